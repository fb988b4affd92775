"""The one writer of the history database: a bounded queue, emptied in one transaction every moment.

Nobody waits for it. Where the file cannot be written, what is queued stays queued and is tried again; what
no longer fits is given up, counted, and shown (`HistoryStatus`). A transaction that the database refuses is
given up alone: what was to be written with it is written.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice

import msgspec
from sqlalchemy import Connection

from app.db.database import Database
from app.db.faults import FileFaultError
from app.db.writes import Put, Write, count_rows, measure, merge
from app.errors import HistoryUnavailableError

logger = logging.getLogger(__name__)

FLUSH_S = 0.6
"""What comes together within so long is written together, unless somebody waits for it or reads.

A transaction costs a millisecond, whatever is in it: a share of each step if every step gets one of its own.
"""

CATCH_UP_S = 0.25
"""So long a reader waits at most for what was queued before."""

MAX_QUEUED_PUTS = 16_384
MAX_QUEUED_BYTES = 32 * 2**20
MAX_BATCH_PUTS = 2_048
RETRY_S = (0.2, 0.5, 1.0, 2.0)
"""Pauses before the file is tried again; the last one repeats."""

CHECK_FILE_S = 1.0
"""While nothing is written, how often to look whether the file is still there and whole."""


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


OnOpen = Callable[[Database], Awaitable[None]]


class HistoryWriter:
    """Lives on the event loop; `put` is all that others need."""

    def __init__(self, database: Database, *, flush_s: float = FLUSH_S) -> None:
        """Begin to collect at once; `start` begins to write."""
        self._database = database
        self._flush_s = flush_s
        self._queue: deque[Put] = deque()
        self._num_bytes = 0
        self._num_put = 0
        self._num_settled = 0
        self._slow_after = -1  # so much was settled when a reader had waited in vain
        self._num_alone = 0  # so many of the queue's first are written one by one
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()  # numbers of puts, ascending
        self._state = "opening"
        self._reason = ""
        self._num_lost_steps = 0
        self._num_lost_writes = 0
        self._has_told_overflow = False
        self._has_told_refusal = False
        self._num_failures = 0
        self._on_open: list[OnOpen] = []
        self._holders: list[Callable[[], None]] = []
        self._wake = asyncio.Event()
        self._hurry = asyncio.Event()
        self._is_stopping = False
        self._writing = asyncio.Lock()
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

    def add_on_open(self, function: OnOpen) -> None:
        """Have `function` called once the file is open, before anything is written. Call before `start`.

        It may use `Database.write`, since the writer waits for it. It is called again if the file cannot be
        written just then; anything else that it raises is logged.
        """
        self._on_open.append(function)

    def add_holder(self, flush: Callable[[], None]) -> None:
        """Have `flush` called, on the event loop, before a write or a reading: it puts what it held back."""
        self._holders.append(flush)

    def put(self, *writes: Write) -> bool:
        """Queue statements for one transaction; False if there was no room and they are lost."""
        num_bytes = sum(measure(write) for write in writes)
        if not self.has_room(num_bytes):
            if self._state != "off" and not self._has_told_overflow:
                logger.error("The queue of the history is full; steps and rows are lost until it is not.")
                self._has_told_overflow = True
            self._lose(writes)
            return False
        self._queue.append(Put(writes, num_bytes))
        self._num_bytes += num_bytes
        self._num_put += 1
        self._wake.set()
        return True

    def has_room(self, num_bytes: int) -> bool:
        """Whether a transaction of this size would be queued now."""
        fits = len(self._queue) < MAX_QUEUED_PUTS and self._num_bytes + num_bytes <= MAX_QUEUED_BYTES
        return self._state != "off" and fits

    async def settle(self) -> None:
        """Wait until all that was put before is written or given up. May be called on another loop."""
        number = self._num_put
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append((number, waiter))
        if self._num_settled < number:  # after it was added: nobody is forgotten
            if self._task is not None:
                with suppress(RuntimeError):  # the writer's loop has ended
                    self._task.get_loop().call_soon_threadsafe(self._hurry.set)
            await waiter

    async def catch_up(self) -> None:
        """Have all that is known by now written, unless that takes long: for whoever reads next.

        Where it took too long nobody waits again before something is written. On another loop than the
        writer's what is held back is left out.
        """
        if self._state != "recording" or self._is_stopping or self._task is None:
            return
        if asyncio.get_running_loop() is self._task.get_loop():
            self._flush_holders()
        if self._num_settled in {self._num_put, self._slow_after}:
            return
        try:
            async with asyncio.timeout(CATCH_UP_S):
                await self.settle()
        except TimeoutError:
            self._slow_after = self._num_settled

    def _flush_holders(self) -> None:
        for flush in self._holders:
            try:
                flush()
            except Exception:
                logger.exception("Something for the history could not be put")

    def start(self) -> None:
        """Open the file and write, in the background; who reads it finds it up to date."""
        self._database.before_read = self.catch_up
        self._task = asyncio.create_task(self._run())

    async def stop(self, timeout_s: float) -> None:
        """Write what is queued, for at most `timeout_s`, and close the file."""
        self._is_stopping = True
        self._wake.set()
        if self._task is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self.settle()
            async with self._writing:  # what is being written would be written all the same
                self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._queue:
            num_rows = sum(count_rows(put.writes) for put in self._queue)
            logger.error("The history is not complete: %d rows could not be written", num_rows)
            self._drop(len(self._queue), is_lost=True)
        await self._database.close()

    async def _run(self) -> None:
        try:
            if await self._open():
                while self._state != "off":
                    await self._wait_for_work()
                    async with self._writing:
                        await self._write_some()
        except Exception:
            logger.exception("The history's writer has failed")
            await self._give_up("The writing of the history has failed; the log says why.")

    async def _open(self) -> bool:
        """Open the file, trying again for as long as that may help; False if the history stays off."""
        while True:
            try:
                await self._database.open()
                await self._put_in_order()
            except HistoryUnavailableError as error:
                if not isinstance(error, FileFaultError) or error.is_final:
                    await self._give_up(str(error))
                    return False
                await self._database.close(str(error))
                self._fail(str(error))
                await self._pause()
            else:
                self._recover()
                return True

    async def _put_in_order(self) -> None:
        for function in self._on_open:
            try:
                await function(self._database)
            except HistoryUnavailableError:
                raise
            except Exception:
                logger.exception("The history could not be put in order")

    async def _wait_for_work(self) -> None:
        """Return when something is queued, or when it is time to look at the file again."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CHECK_FILE_S):
                await self._wake.wait()
        if self._queue:
            await self._pause()

    async def _pause(self) -> None:
        """Let more come together, while nobody waits; after failures, give the file time."""
        if self._num_failures:
            await asyncio.sleep(RETRY_S[min(self._num_failures, len(RETRY_S)) - 1])
        elif not self._is_stopping and not self._num_alone:
            self._hurry.clear()
            if not self._waiters:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._flush_s):
                        await self._hurry.wait()

    async def _write_some(self) -> None:
        if self._queue and self._state == "recording":
            self._flush_holders()  # it goes with what is written anyway
        num_puts = 1 if self._num_alone else min(len(self._queue), MAX_BATCH_PUTS)
        batch = list(islice(self._queue, num_puts))
        try:
            if not batch:
                await asyncio.to_thread(self._database.check_file)
                return
            await self._database.write(partial(_write_batch, batch))
        except HistoryUnavailableError as error:
            if isinstance(error, FileFaultError) and error.is_final:
                await self._give_up(str(error))
            else:
                self._fail(str(error))
        except Exception as error:  # noqa: BLE001 - whatever a driver makes of values that do not fit
            self._refuse(batch, error)
        else:
            self._drop(num_puts, is_lost=False)
            self._recover()

    def _refuse(self, batch: Sequence[Put], error: Exception) -> None:
        """Find the transaction that is refused by writing each alone, and give it up."""
        if len(batch) > 1:
            self._num_alone = len(batch)
            return
        if not self._has_told_refusal:
            self._has_told_refusal = True
            logger.error(
                "Rows of the history were refused and are lost; others will be counted", exc_info=error
            )
        self._drop(1, is_lost=True)

    def _drop(self, num_puts: int, *, is_lost: bool) -> None:
        for _ in range(num_puts):
            put = self._queue.popleft()
            self._num_bytes -= put.num_bytes
            if is_lost:
                self._lose(put.writes)
        self._num_settled += num_puts
        self._num_alone = max(0, self._num_alone - num_puts)
        if not self._queue:
            self._wake.clear()
        while self._waiters and self._waiters[0][0] <= self._num_settled:
            _, waiter = self._waiters.popleft()
            with suppress(RuntimeError):  # its loop has ended
                waiter.get_loop().call_soon_threadsafe(_wake, waiter)

    def _lose(self, writes: Sequence[Write]) -> None:
        self._num_lost_writes += count_rows(writes)
        for write in writes:
            self._num_lost_steps += write.num_steps
            if write.on_lost is not None:
                write.on_lost()

    def _fail(self, reason: str) -> None:
        if self._state != "failing":
            logger.error("%s The engine goes on; the history waits.", reason)
        self._state, self._reason = "failing", reason
        self._num_failures += 1

    def _recover(self) -> None:
        if self._state == "failing":
            logger.warning("The history is written again")
        self._state, self._reason = "recording", ""
        self._num_failures = 0
        self._has_told_overflow = False

    async def _give_up(self, reason: str) -> None:
        logger.error("%s Nothing more is recorded in this run; the engine goes on.", reason)
        self._state, self._reason = "off", reason
        self._drop(len(self._queue), is_lost=True)
        await self._database.close(reason)


def _write_batch(batch: Sequence[Put], connection: Connection) -> None:
    for statement, rows in merge(batch):
        connection.execute(statement, rows or None)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
