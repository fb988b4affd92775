"""After a crash: what had no end when the process died gets one, at the next start."""

import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from sqlalchemy import Connection, bindparam, func, select, update

from app.db.database import Database
from app.db.models import ChunkRow, KeyframeRow, MessageRow, RequestEventRow, RequestRow, SessionRow
from app.errors import HistoryUnavailableError
from app.history.record_codec import decode_records, decode_state
from engine.config import EngineConfig
from engine.errors import EngineInvariantError
from engine.snapshot import EngineSnapshot

logger = logging.getLogger(__name__)

INTERRUPTED: Final = "interrupted"
OPEN_STATUSES: Final = ("waiting", "running")

MAX_ROWS: Final = 512
"""Rows of records that are read for one session: after the newest state there are some 256 small ones."""

_END_REQUEST: Final = (
    update(RequestRow)
    .where(RequestRow.id == bindparam("row_id"))
    .values(
        status=INTERRUPTED,
        ended_step=bindparam("step"),
        ended_ns=bindparam("t_ns"),
        num_output_tokens=bindparam("num_tokens"),
    )
)


async def repair_after_crash(database: Database, session_id: str) -> None:
    """End all sessions but `session_id`, their open requests and half-written answers as interrupted.

    Called once, when the file has been opened and before anything is written: the data folder is locked, so
    no other server can be writing what is ended here. A session ended when its last step began, a request
    with the last step that is recorded, with the tokens that it had by then.
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
    messages = update(MessageRow).where(MessageRow.status == "streaming").values(status=INTERRUPTED)

    def repair(connection: Connection) -> tuple[int, int, int]:
        return (
            connection.execute(sessions).rowcount,
            _end_requests(connection, session_id),
            connection.execute(messages).rowcount,
        )

    num_sessions, num_requests, num_messages = await database.write(repair)
    if num_sessions:
        logger.warning(
            "The last run did not end in order: %d sessions, %d requests and %d messages are interrupted",
            num_sessions,
            num_requests,
            num_messages,
        )


def _end_requests(connection: Connection, session_id: str) -> int:
    """End the open requests of other sessions; return how many there were."""
    query = select(
        RequestRow.id, RequestRow.session_id, RequestRow.num_output_tokens, RequestRow.arrived_ns
    ).where(RequestRow.status.in_(OPEN_STATUSES), RequestRow.session_id != session_id)
    by_session = defaultdict(list)
    for row in connection.execute(query):
        by_session[row.session_id].append(row)
    ends = []
    for name, rows in by_session.items():
        last = _find_last(connection, name)
        ends += [_make_end(connection, row, last) for row in rows]
    if ends:
        connection.execute(_END_REQUEST, ends)
    return len(ends)


_UNREADABLE = (
    HistoryUnavailableError,
    EngineInvariantError,
    LookupError,
    ValueError,
    msgspec.MsgspecError,
)
"""What a damaged session may raise while it is folded."""


class _Last(msgspec.Struct, frozen=True):
    """The end of a session: its last step, when that ended, and each open sequence's tokens.

    `num_tokens`: by request and choice; empty where the records cannot be read.
    """

    step: int
    t_ns: int
    num_tokens: dict[str, dict[int, int]]


def _make_end(connection: Connection, row: Any, last: _Last) -> dict[str, Any]:
    """Return the end of one request; its events may be newer than the last step record that was written."""
    events = (
        connection.execute(
            select(
                RequestEventRow.choice_index,
                RequestEventRow.step,
                RequestEventRow.t_ns,
                RequestEventRow.kind,
                RequestEventRow.detail,
            ).where(RequestEventRow.request_id == row.id)
        )
    ).all()
    num_tokens = dict(last.num_tokens.get(row.id, {}))
    for event in events:
        if event.kind == "finished":
            num_tokens[event.choice_index] = msgspec.json.decode(event.detail)["num_output_tokens"]
    return {
        "row_id": row.id,
        "step": max([last.step, *(event.step for event in events)]),
        "t_ns": max([last.t_ns, row.arrived_ns, *(event.t_ns for event in events)]),
        "num_tokens": max(row.num_output_tokens, sum(num_tokens.values())),
    }


def _find_last(connection: Connection, session_id: str) -> _Last:
    session = (
        connection.execute(
            select(
                SessionRow.config, SessionRow.first_step, SessionRow.last_step, SessionRow.started_ns
            ).where(SessionRow.id == session_id)
        )
    ).one()
    found = connection.execute(
        select(KeyframeRow.step, KeyframeRow.state)
        .where(KeyframeRow.session_id == session_id)
        .order_by(KeyframeRow.step.desc())
        .limit(1)
    )
    keyframe = found.first()
    start = keyframe.step + 1 if keyframe is not None else session.first_step
    chunks = (
        connection.execute(
            select(ChunkRow.records, ChunkRow.last_ns)
            .where(ChunkRow.session_id == session_id, ChunkRow.first_step >= start)
            .order_by(ChunkRow.first_step)
            .limit(MAX_ROWS)
        )
    ).all()
    state = keyframe.state if keyframe is not None else None
    if session.config is not None and (state is not None or session.first_step == 1):
        data = [chunk.records for chunk in chunks]
        try:
            config = msgspec.json.decode(session.config, type=EngineConfig)
            last = _fold(config, state, data)
        except _UNREADABLE as error:
            logger.warning("The last steps of session %s cannot be read: %s", session_id, error)
        else:
            if last is not None and last.step == session.last_step:
                return last
    t_ns = chunks[-1].last_ns if chunks else session.started_ns
    return _Last(session.last_step, t_ns, {})


def _fold(config: EngineConfig, state: bytes | None, chunks: Sequence[bytes]) -> _Last | None:
    """Return the end that these records lead to; they follow `state`, or the session's start."""
    snapshot = EngineSnapshot(config)
    if state is not None:
        snapshot = EngineSnapshot.from_state(config, decode_state(state))
    for data in chunks:
        for record in decode_records(data):
            snapshot.apply(record)
    last = snapshot.last_record
    if last is None:
        return None
    num_tokens: dict[str, dict[int, int]] = defaultdict(dict)
    for view in snapshot.sequences.values():
        num_tokens[view.request_id][view.choice_index] = view.num_output_tokens
    end_ns = last.t_ns + last.schedule_ns + last.forward_ns + last.sample_ns + last.host_ns
    return _Last(snapshot.step, end_ns, num_tokens)
