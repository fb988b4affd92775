"""Deleting from the history in pieces: the one connection that writes is held for moments only.

Between two pieces what is left makes sense: a session's steps are given up before they are gone, and its row
goes last.
"""

from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Executable,
    delete,
    exists,
    func,
    literal_column,
    select,
    update,
)

from app.db.database import Database
from app.db.models import (
    ChunkRow,
    KeyframeRow,
    MetricRow,
    RequestEventRow,
    RequestRow,
    RequestTextRow,
    SessionRow,
)

PIECE_BYTES = 8 * 2**20
"""At most about so many bytes of records, states and texts are deleted in one transaction."""

PIECE_ROWS = 2_000
PIECE_REQUESTS = 500
"""A request takes its texts and its events with it."""

_ROWID: ColumnElement[int] = literal_column("rowid", BigInteger)
_NOTHING: ColumnElement[int] = literal_column("0", BigInteger)
_TEXT_BYTES = (
    select(func.length(RequestTextRow.prompt) + func.coalesce(func.length(RequestTextRow.outputs), 0))
    .where(RequestTextRow.request_id == RequestRow.id)
    .scalar_subquery()
)


async def delete_session(database: Database, session_id: str) -> None:
    """Delete a session that has ended, with all that is recorded of it; again if that was cut off.

    Raises `HistoryUnavailableError` if the file cannot be written; the session may then be there in part.
    """
    await delete_steps(database, session_id)
    while await delete_old_requests(database, session_id):
        pass
    # What is left had no end, or one that no step record tells of.
    requests = RequestRow.session_id == session_id
    while await _delete_piece(database, RequestRow, requests, _TEXT_BYTES, PIECE_REQUESTS):
        pass
    for model in (RequestEventRow, MetricRow):
        while await _delete_piece(database, model, model.session_id == session_id):
            pass
    await _execute(database, delete(SessionRow).where(SessionRow.id == session_id))


async def delete_steps(database: Database, session_id: str) -> None:
    """Delete all steps of a session that has ended; raises `HistoryUnavailableError`."""
    given_up = update(SessionRow).where(SessionRow.id == session_id)
    await _execute(database, given_up.values(first_step=SessionRow.last_step + 1))
    chunks = ChunkRow.session_id == session_id
    while await _delete_piece(database, ChunkRow, chunks, func.length(ChunkRow.records)):
        pass
    states = KeyframeRow.session_id == session_id
    while await _delete_piece(database, KeyframeRow, states, func.length(KeyframeRow.state)):
        pass


async def delete_old_requests(database: Database, session_id: str) -> int:
    """Delete some requests that ended before the session's first step, the oldest; return the number of rows.

    Their texts and events go too, and the seconds of that time. Raises `HistoryUnavailableError`.
    """
    first_step = select(SessionRow.first_step).where(SessionRow.id == session_id).scalar_subquery()
    query = (
        select(RequestRow.id, RequestRow.arrived_step, func.coalesce(_TEXT_BYTES, 0), first_step)
        .where(RequestRow.session_id == session_id, RequestRow.ended_step < first_step)
        .order_by(RequestRow.arrived_step)
        .limit(PIECE_REQUESTS)
    )
    async with database.read() as db:
        found = (await db.execute(query)).all()
        end = await db.scalar(select(first_step)) or 1
    count = _count_piece([row[2] for row in found])
    if count == PIECE_REQUESTS or count < len(found):
        end = min(end, found[count - 1].arrived_step)  # what others of them leave behind comes with them

    def delete_them(connection: Connection) -> int:
        num_rows = _delete_requests(connection, [row.id for row in found[:count]])
        return num_rows + _delete_leftovers(connection, session_id, end)

    return await database.write(delete_them)


def _delete_requests(connection: Connection, request_ids: list[str]) -> int:
    events = delete(RequestEventRow).where(RequestEventRow.request_id.in_(request_ids))
    connection.execute(events)
    requests = delete(RequestRow).where(RequestRow.id.in_(request_ids))
    return connection.execute(requests).rowcount


def _delete_leftovers(connection: Connection, session_id: str, end: int) -> int:
    """Delete seconds before step `end`, and events that are of no request that is there."""
    seconds = select(MetricRow.second).where(MetricRow.session_id == session_id)
    metrics = delete(MetricRow).where(
        MetricRow.session_id == session_id,
        MetricRow.second.in_(seconds.order_by(MetricRow.second).limit(PIECE_ROWS)),
        MetricRow.last_step < end,
    )
    is_orphan = ~exists().where(RequestRow.id == RequestEventRow.request_id)
    orphans = (
        select(RequestEventRow.seq)
        .where(RequestEventRow.session_id == session_id, RequestEventRow.step < end, is_orphan)
        .limit(PIECE_ROWS)
    )
    events = delete(RequestEventRow).where(
        RequestEventRow.session_id == session_id, RequestEventRow.seq.in_(orphans)
    )
    return sum(connection.execute(statement).rowcount for statement in (metrics, events))


async def _delete_piece(
    database: Database,
    model: Any,
    condition: ColumnElement[bool],
    num_bytes: ColumnElement[Any] = _NOTHING,
    num_rows: int = PIECE_ROWS,
) -> bool:
    """Delete some of the rows that fit `condition`; return whether there were any."""
    async with database.read() as db:
        query = select(_ROWID, func.coalesce(num_bytes, 0)).select_from(model)
        found = (await db.execute(query.where(condition).limit(num_rows))).all()
    rowids = [row[0] for row in found[: _count_piece([row[1] for row in found])]]
    if rowids:
        await _execute(database, delete(model).where(_ROWID.in_(rowids), condition))
    return bool(rowids)


async def _execute(database: Database, statement: Executable) -> None:
    await database.write(lambda connection: connection.execute(statement))


def _count_piece(sizes: list[int]) -> int:
    """Return how many of the first rows make a piece, at least one if there is one."""
    total = 0
    for index, size in enumerate(sizes):
        total += size
        if total >= PIECE_BYTES:
            return index + 1
    return len(sizes)
