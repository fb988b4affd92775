"""The one writer of the history database: a bounded queue, emptied in one transaction every moment.

Nobody waits for it. Where the file cannot be written, what is queued stays queued and is tried again; what
no longer fits is given up, counted, and shown (`HistoryStatus`). A transaction that the database refuses is
given up alone: what was to be written with it is written.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any

import msgspec
from sqlalchemy import Connection, Executable

from app.db.database import Database
from app.db.faults import FileFaultError
from app.errors import HistoryUnavailableError

logger = logging.getLogger(__name__)

FLUSH_S = 0.15
"""What comes together within so long is written together, unless somebody waits for it.

A transaction costs the event loop milliseconds, whatever is in it: a share of each step if every step gets
one of its own.
"""

MAX_QUEUED_PUTS = 16_384
MAX_QUEUED_BYTES = 32 * 2**20
MAX_BATCH_PUTS = 2_048
RETRY_S = (0.2, 0.5, 1.0, 2.0)
"""Pauses before the file is tried again; the last one repeats."""

CHECK_FILE_S = 1.0
"""How often to look whether the file is still there and whole, and whether a reader has met damage."""

_ROW_BYTES = 256
"""What a row takes in memory beside its texts and blobs."""

Rows = Sequence[Mapping[str, Any]]


class Turn(IntEnum):
    """Which writes of a transaction come first, whatever the order in which they were put.

    Each statement costs a trip to the database's thread and back, through an event loop and past an engine
    that are busy; rows by the thousand cost little more than one. So the statements that come with steps
    are told apart by their turns, and all rows of one turn go in one trip. That is right because no row is
    changed in a turn before the one that makes it, nor refers to one of a later turn.
    """

    REQUEST = 1
    TEXT = 2
    CHANGE = 3
    EVENT = 4
    OUTPUT = 5
    DELIVERY = 6
    """What the client got counts more than what a change said before."""

    STEPS = 7
    SESSION = 8
    OLD_STEPS = 9
    """Steps that compact rows take the place of: their small rows were put before."""

    COMPACT_STEPS = 10
    STATE = 11
    METRICS = 12


@dataclass(frozen=True)
class Write:
    """One statement with its rows, which all have the same keys.

    `num_steps` step records are lost if it is; `on_lost` is told then, on the event loop. `num_bytes` is
    what it holds in memory, 0: to be counted. Those with a `turn` that follow each other are written by
    turns, those without stay exactly where they were put.
    """

    statement: Executable
    rows: Rows = ()
    num_bytes: int = 0
    num_steps: int = 0
    on_lost: Callable[[], None] | None = None
    turn: Turn | None = None


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


@dataclass(frozen=True)
class _Put:
    """What is written in one transaction."""

    writes: tuple[Write, ...]
    num_bytes: int


class HistoryWriter:
    """Lives on the event loop; `put` is all that others need."""

    def __init__(self, database: Database, *, flush_s: float = FLUSH_S) -> None:
        """Begin to collect at once; `start` begins to write."""
        self._database = database
        self._flush_s = flush_s
        self._queue: deque[_Put] = deque()
        self._num_bytes = 0
        self._num_put = 0
        self._num_settled = 0
        self._num_alone = 0  # so many of the queue's first are written one by one
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()  # numbers of puts, ascending
        self._state = "opening"
        self._reason = ""
        self._num_lost_steps = 0
        self._num_lost_writes = 0
        self._has_told_overflow = False
        self._has_told_refusal = False
        self._num_failures = 0
        self._checked_s = 0.0
        self._on_open: list[OnOpen] = []
        self._wake = asyncio.Event()
        self._hurry = asyncio.Event()
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

    def add_on_open(self, function: OnOpen) -> None:
        """Have `function` called once the file is open, before anything is written. Call before `start`.

        It may use `Database.write`, since the writer waits for it. It is called again if the file cannot be
        written just then; anything else that it raises is logged.
        """
        self._on_open.append(function)

    def put(self, *writes: Write) -> bool:
        """Queue statements for one transaction; False if there was no room and they are lost."""
        num_bytes = sum(write.num_bytes or _measure(write) for write in writes)
        if not self.has_room(num_bytes):
            if self._state != "off" and not self._has_told_overflow:
                logger.error("The queue of the history is full; steps and rows are lost until it is not.")
                self._has_told_overflow = True
            self._lose(writes)
            return False
        self._queue.append(_Put(writes, num_bytes))
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

    def start(self) -> None:
        """Open the file and write, in the background."""
        self._task = asyncio.create_task(self._run())

    async def stop(self, timeout_s: float) -> None:
        """Write what is queued, for at most `timeout_s`, and close the file."""
        self._is_stopping = True
        self._wake.set()
        if self._task is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self.settle()
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._queue:
            num_rows = sum(_count_rows(put.writes) for put in self._queue)
            logger.error("The history is not complete: %d rows could not be written", num_rows)
            self._drop(len(self._queue), is_lost=True)
        await self._database.close()

    async def _run(self) -> None:
        try:
            if await self._open():
                while self._state != "off":
                    await self._wait_for_work()
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
        num_puts = 1 if self._num_alone else min(len(self._queue), MAX_BATCH_PUTS)
        batch = list(islice(self._queue, num_puts))
        try:
            await self._check_file()
            if not batch:
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

    async def _check_file(self) -> None:
        now_s = time.monotonic()
        if now_s - self._checked_s >= CHECK_FILE_S:
            self._checked_s = now_s
            await asyncio.to_thread(self._database.check_file)

    def _refuse(self, batch: Sequence[_Put], error: Exception) -> None:
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
        self._num_lost_writes += _count_rows(writes)
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


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _count_rows(writes: Sequence[Write]) -> int:
    return sum(max(1, len(write.rows)) for write in writes)


def _measure(write: Write) -> int:
    """Return about how much memory a write takes."""
    texts = (len(value) for row in write.rows for value in row.values() if isinstance(value, (str, bytes)))
    return _ROW_BYTES * max(1, len(write.rows)) + sum(texts)


def _write_batch(batch: Sequence[_Put], connection: Connection) -> None:
    for statement, rows in _merge(batch):
        connection.execute(statement, rows or None)


def _merge(batch: Sequence[_Put]) -> Iterator[tuple[Executable, list[Mapping[str, Any]]]]:
    """Yield statements in order, those that follow each other with the same columns as one."""
    statement: Executable | None = None
    rows: list[Mapping[str, Any]] = []
    for write in _take_turns(batch):
        is_same = write.statement is statement and rows and write.rows
        if is_same and write.rows[0].keys() == rows[0].keys():
            rows.extend(write.rows)
            continue
        if statement is not None:
            yield statement, rows
        statement, rows = write.statement, list(write.rows)
    if statement is not None:
        yield statement, rows


def _take_turns(batch: Sequence[_Put]) -> list[Write]:
    """Return the writes in the order in which they are to be made (`Turn`)."""
    ordered: list[Write] = []
    in_turns: list[Write] = []
    for write in (write for put in batch for write in put.writes):
        if write.turn is not None:
            in_turns.append(write)
            continue
        ordered += [*sorted(in_turns, key=attrgetter("turn")), write]
        in_turns = []
    return ordered + sorted(in_turns, key=attrgetter("turn"))
