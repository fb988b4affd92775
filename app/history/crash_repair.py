"""After a crash: what had no end when the process died gets one, at the next start."""

import logging

from sqlalchemy import func, select, update

from app.db.database import Database
from app.db.models import ChunkRow, MessageRow, RequestRow, SessionRow

logger = logging.getLogger(__name__)

INTERRUPTED = "interrupted"


async def repair_after_crash(database: Database, session_id: str) -> None:
    """End all sessions but `session_id`, their open requests and half-written answers as interrupted.

    Called once, when the file has been opened and before anything is written: the data folder is locked, so
    no other server can be writing what is ended here. A session ended when its last step began.
    """
    last_ns = (
        select(ChunkRow.last_ns)
        .where(ChunkRow.session_id == SessionRow.id)
        .order_by(ChunkRow.first_step.desc())
        .limit(1)
        .scalar_subquery()
    )
    sessions = (
        update(SessionRow)
        .where(SessionRow.ended_ns.is_(None), SessionRow.id != session_id)
        .values(ended_how=INTERRUPTED, ended_ns=func.coalesce(last_ns, SessionRow.started_ns))
    )
    requests = (
        update(RequestRow)
        .where(RequestRow.status.in_(("waiting", "running")), RequestRow.session_id != session_id)
        .values(status=INTERRUPTED)
    )
    messages = update(MessageRow).where(MessageRow.status == "streaming").values(status=INTERRUPTED)
    async with database.write() as connection:
        counts = [
            (await connection.execute(statement)).rowcount for statement in (sessions, requests, messages)
        ]
    if any(counts):
        logger.warning(
            "The last run did not end in order: %d sessions, %d requests and %d messages are interrupted",
            *counts,
        )
