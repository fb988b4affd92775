"""Keeps the history within its size: the oldest steps go first, conversations never.

What goes, in this order: steps, of ended sessions first, the oldest first, then of the one that is being
recorded but for its newest; requests, events and seconds that are older than the steps that are left, in the
same order of sessions; then ended sessions with all that is left of them. Starred sessions are left alone.
Deleted pages are used again, and given back to the file system a little at a time.
"""

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy import Connection, delete, exists, func, select, text, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.database import Database
from app.db.models import Base, ChunkRow, KeyframeRow, SessionRow
from app.db.writer import HistoryWriter
from app.errors import HistoryUnavailableError
from app.history.deletion import PIECE_BYTES, delete_old_requests, delete_session, delete_steps
from app.history.step_log import CHUNK_STEPS

logger = logging.getLogger(__name__)

INTERVAL_S = 60.0
TARGET_SHARE = 0.9
"""Once the limit is passed, room is made down to this share of it, so that it lasts for a while."""

KEPT_STEPS = 4 * CHUNK_STEPS
"""So many of its newest steps the session that is being recorded keeps, whatever the limit."""

VACUUM_PAGES = 1_024
MIN_FREE_PAGES = 64
"""So few free pages are left for what comes next."""

_MAX_CHUNKS_READ = 4_096


@dataclass(frozen=True)
class Usage:
    """Pages of the database, in bytes: `used` hold something, `free` wait to be used again."""

    used_bytes: int
    free_pages: int


@dataclass(frozen=True)
class _Cut:
    """What to give up of a session: its steps to `last_step`. `is_all`: no step is left."""

    session_id: str
    last_step: int
    is_all: bool


class Retention:
    """Looks at the size once a minute. Lives on the event loop."""

    def __init__(self, database: Database, writer: HistoryWriter, session_id: str, limit_bytes: int) -> None:
        """`session_id` is the session that is being recorded."""
        self._database = database
        self._writer = writer
        self._session_id = session_id
        self._limit_bytes = limit_bytes
        self._bare: set[str] = set()  # sessions without old requests, while room is made
        self._has_told_limit = False
        self._has_told_fault = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look once all that has been put is written, and then every minute."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End; call before the writer stops."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def measure(self) -> Usage:
        """Return how large the history is; raises `HistoryUnavailableError`."""
        async with self._database.read() as session:
            count, free, size = [
                int((await session.execute(text(f"PRAGMA {name}"))).scalar_one())
                for name in ("page_count", "freelist_count", "page_size")
            ]
        return Usage((count - free) * size, free)

    async def shrink(self) -> None:
        """Bring the history below its limit if it is above; raises `HistoryUnavailableError`."""
        usage = await self.measure()
        self._bare.clear()
        if usage.used_bytes > self._limit_bytes:
            target = int(self._limit_bytes * TARGET_SHARE)
            while usage.used_bytes > target and await self._give_up_some(usage.used_bytes - target):
                usage = await self.measure()
            self._tell_limit(usage.used_bytes)
        while usage.free_pages > MIN_FREE_PAGES:
            await self._vacuum()
            before, usage = usage, await self.measure()
            if usage.free_pages >= before.free_pages:
                break

    async def _run(self) -> None:
        await self._writer.settle()
        while True:
            try:
                if self._database.is_open:
                    await self._look()
                    await self.shrink()
            except HistoryUnavailableError as error:
                logger.debug("The history's size is not looked at: %s", error)
            except Exception:
                if not self._has_told_fault:
                    logger.exception("The history's size cannot be kept")
                self._has_told_fault = True
            await asyncio.sleep(INTERVAL_S)

    async def _look(self) -> None:
        """Read a little of each table: damage is found even if nobody looks at the history."""
        ends = ", ".join(
            f"(SELECT {end}(rowid) FROM {name})"  # noqa: S608 - our own tables
            for name in Base.metadata.tables
            for end in ("min", "max")
        )
        async with self._database.read() as session:
            await session.execute(text(f"SELECT {ends}"))

    def _tell_limit(self, used_bytes: int) -> None:
        is_over = used_bytes > self._limit_bytes
        if is_over and not self._has_told_limit:
            logger.warning(
                "The history takes %d bytes, more than --history-size %d: what is left are conversations, "
                "starred sessions, and the newest steps of this run with their requests, which are kept.",
                used_bytes,
                self._limit_bytes,
            )
        self._has_told_limit = is_over

    async def _give_up_some(self, num_bytes: int) -> bool:
        """Delete what is least worth keeping, about `num_bytes` or less; False if there is nothing."""
        async with self._database.read() as session:
            cut = await self._find_cut(session, min(num_bytes, PIECE_BYTES))
        if cut is not None:
            await self._cut(cut)
            return True
        async with self._database.read() as session:
            names = await self._find_sessions(session)
        for name in names:
            if name not in self._bare and await delete_old_requests(self._database, name):
                return True
            self._bare.add(name)
        victim = next((name for name in names if name != self._session_id), None)
        if victim is not None:
            await delete_session(self._database, victim)
            logger.info("Session %s gave way to newer ones", victim)
        return victim is not None

    async def _cut(self, cut: _Cut) -> None:
        if cut.is_all:
            await delete_steps(self._database, cut.session_id)
        else:
            await self._database.write(partial(_cut_start, cut))
        logger.info("Steps up to %d of session %s gave way to newer ones", cut.last_step, cut.session_id)

    async def _find_cut(self, session: AsyncSession, num_bytes: int) -> _Cut | None:
        has_steps = exists().where(ChunkRow.session_id == SessionRow.id)
        query = select(SessionRow.id, SessionRow.last_step).where(~SessionRow.is_starred, has_steps)
        for session_id, last_step in (await session.execute(query.order_by(*self._order()))).all():
            cut = await self._find_cut_in(session, session_id, last_step, num_bytes)
            if cut is not None:
                return cut
        return None

    async def _find_cut_in(
        self, session: AsyncSession, session_id: str, last_step: int, num_bytes: int
    ) -> _Cut | None:
        """Return the shortest piece at a session's start that frees so much, or the longest there is."""
        query = (
            select(ChunkRow.first_step + ChunkRow.num_steps - 1, func.length(ChunkRow.records))
            .where(ChunkRow.session_id == session_id)
            .order_by(ChunkRow.first_step)
            .limit(_MAX_CHUNKS_READ)
        )
        chunks = (await session.execute(query)).all()
        states = (
            select(KeyframeRow.step, func.length(KeyframeRow.state))
            .where(
                KeyframeRow.session_id == session_id,
                KeyframeRow.step % CHUNK_STEPS == 0,  # sessions begin with a complete chunk
                KeyframeRow.step <= last_step - (KEPT_STEPS if session_id == self._session_id else 0),
            )
            .order_by(KeyframeRow.step)
        )
        best, freed, index = None, 0, 0
        for step, num_state_bytes in (await session.execute(states)).all():
            while index < len(chunks) and chunks[index][0] <= step:
                freed += chunks[index][1]
                index += 1
            if index:
                best = step
            if freed >= num_bytes:
                break
            freed += num_state_bytes  # the next cut takes it
        is_short = freed < num_bytes and len(chunks) < _MAX_CHUNKS_READ
        if session_id != self._session_id and (is_short or best is None or best >= last_step):
            return _Cut(session_id, last_step, is_all=True)
        return None if best is None else _Cut(session_id, best, is_all=False)

    async def _find_sessions(self, session: AsyncSession) -> list[str]:
        query = select(SessionRow.id).where(~SessionRow.is_starred).order_by(*self._order())
        return list((await session.execute(query)).scalars())

    def _order(self) -> tuple[Any, ...]:
        """The oldest first; the running session, which a clock set back may make the oldest, comes last."""
        return (SessionRow.id == self._session_id, SessionRow.started_ns, SessionRow.id)

    async def _vacuum(self) -> None:
        await self._database.write(_free_pages)


def _free_pages(connection: Connection) -> None:
    driver_connection = connection.connection.driver_connection
    assert driver_connection is not None, "the connection is open"  # noqa: S101
    # As one statement it would free a single page: it has to be stepped to its end, as a script is.
    # That ends our transaction first; the pragma has one of its own.
    driver_connection.executescript(f"PRAGMA incremental_vacuum({VACUUM_PAGES})").close()


def _cut_start(cut: _Cut, connection: Connection) -> None:
    """Delete a session's steps up to one, whose state stays as what the later ones are folded from."""
    of_session = KeyframeRow.session_id == cut.session_id
    base = update(KeyframeRow).where(of_session, KeyframeRow.step == cut.last_step)
    connection.execute(base.values(is_base=True))
    connection.execute(
        delete(ChunkRow).where(
            ChunkRow.session_id == cut.session_id,
            ChunkRow.first_step + ChunkRow.num_steps - 1 <= cut.last_step,
        )
    )
    connection.execute(delete(KeyframeRow).where(of_session, KeyframeRow.step < cut.last_step))
    start = update(SessionRow).where(SessionRow.id == cut.session_id)
    connection.execute(start.values(first_step=cut.last_step + 1))
