"""The one writer of the history database: a bounded queue, emptied in one transaction every moment.

Nobody waits for it. Where the file cannot be written, what is queued stays queued and is tried again; what
no longer fits is given up, counted, and shown (`HistoryStatus`).
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import Executable
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from app.db.database import Database, describe_database_error
from app.errors import HistoryUnavailableError

logger = logging.getLogger(__name__)

FLUSH_S = 0.05
"""What comes together within so long is written together."""

MAX_QUEUED_WRITES = 16_384
MAX_QUEUED_BYTES = 32 * 2**20
MAX_BATCH_WRITES = 2_048
RETRY_S = (0.2, 0.5, 1.0, 2.0)
"""Pauses before the file is tried again; the last one repeats."""


@dataclass(frozen=True)
class Write:
    """One statement with its rows. `num_steps` step records are lost if it is; `on_lost` is told then."""

    statement: Executable
    rows: Sequence[Mapping[str, Any]] = ()
    num_bytes: int = 0
    num_steps: int = 0
    on_lost: Callable[[], None] | None = None


class HistoryStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Whether history is written.

    `state`: opening, recording, failing (what is queued is kept and tried again), off (for this run).
    `reason` is for people, empty while all is well. Losses count since the server started.
    """

    state: str
    reason: str = ""
    num_lost_steps: int = 0
    num_lost_writes: int = 0
    num_queued: int = 0


class HistoryWriter:
    """Lives on the event loop; `put` is all that others need."""

    def __init__(self, database: Database, *, flush_s: float = FLUSH_S) -> None:
        """Begin to collect at once; `start` begins to write."""
        self._database = database
        self._flush_s = flush_s
        self._queue: deque[tuple[Write, ...]] = deque()
        self._num_bytes = 0
        self._state = "opening"
        self._reason = ""
        self._num_lost_steps = 0
        self._num_lost_writes = 0
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()
        self._settled.set()
        self._is_stopping = False
        self._task: asyncio.Task[None] | None = None

    @property
    def status(self) -> HistoryStatus:
        """How it is going."""
        return HistoryStatus(
            state=self._state,
            reason=self._reason,
            num_lost_steps=self._num_lost_steps,
            num_lost_writes=self._num_lost_writes,
            num_queued=len(self._queue),
        )

    def put(self, *writes: Write) -> bool:
        """Queue statements for one transaction; False if there was no room and they are lost."""
        num_bytes = sum(write.num_bytes for write in writes)
        is_full = len(self._queue) >= MAX_QUEUED_WRITES or self._num_bytes + num_bytes > MAX_QUEUED_BYTES
        if is_full or self._state == "off":
            self._lose(writes)
            return False
        self._queue.append(writes)
        self._num_bytes += num_bytes
        self._settled.clear()
        self._wake.set()
        return True

    async def settle(self) -> None:
        """Wait until all that was put before is written or given up."""
        await self._settled.wait()

    def start(self) -> None:
        """Open the file and write, in the background."""
        self._task = asyncio.create_task(self._run())

    async def stop(self, timeout_s: float) -> None:
        """Write what is queued, for at most `timeout_s`, and close the file."""
        self._is_stopping = True
        self._wake.set()
        if self._task is not None:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._settled.wait()
            except TimeoutError:
                logger.error("The history is not complete: %d writes could not be made", len(self._queue))
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._database.close()

    def _lose(self, writes: Sequence[Write]) -> None:
        for write in writes:
            self._num_lost_writes += max(1, len(write.rows))
            self._num_lost_steps += write.num_steps
            if write.on_lost is not None:
                write.on_lost()

    async def _run(self) -> None:
        try:
            await self._database.open()
        except HistoryUnavailableError as error:
            self._give_up(str(error))
            return
        self._state = "recording"
        failures = 0
        while True:
            await self._wake.wait()
            if not self._is_stopping:
                await asyncio.sleep(self._flush_s if not failures else RETRY_S[min(failures, 4) - 1])
            failures = 0 if await self._write_batch() else failures + 1

    async def _write_batch(self) -> bool:
        batch = [self._queue[index] for index in range(min(len(self._queue), MAX_BATCH_WRITES))]
        try:
            async with self._database.write() as connection:
                for writes in batch:
                    for write in writes:
                        await connection.execute(write.statement, list(write.rows) or None)
        except OperationalError as error:
            self._fail(describe_database_error(self._database.path, error))
            return False
        except SQLAlchemyError:
            logger.exception("History rows were refused")
            self._drop(batch, is_lost=True)
            return True
        self._drop(batch, is_lost=False)
        self._recover()
        return True

    def _drop(self, batch: Sequence[tuple[Write, ...]], *, is_lost: bool) -> None:
        for writes in batch:
            self._queue.popleft()
            self._num_bytes -= sum(write.num_bytes for write in writes)
            if is_lost:
                self._lose(writes)
        if not self._queue:
            self._settled.set()
            self._wake.clear()

    def _fail(self, reason: str) -> None:
        if self._state != "failing":
            logger.error("%s The engine goes on; the history waits.", reason)
        self._state, self._reason = "failing", reason

    def _recover(self) -> None:
        if self._state == "failing":
            logger.warning("The history is written again")
        self._state, self._reason = "recording", ""

    def _give_up(self, reason: str) -> None:
        logger.error("%s Nothing is recorded in this run.", reason)
        self._state, self._reason = "off", reason
        self._drop(list(self._queue), is_lost=True)
