"""Copies blocks between KV pool and host tier beside the computing: one thread, strictly in order.

Order is what keeps contents right: a block's content is read before a later copy writes it, and a host block
is filled before a later load reads it. The rest is one rule for whoever computes: a step may write a block
only when all copies that read it have ended.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine.errors import EngineInvariantError
from engine.runner.copying_thread import CopyingThread
from engine.scheduling.output import ScheduledSequence, SchedulerOutput

COPY_TIMEOUT_S = 30.0
"""A copy takes microseconds; a step that has waited so long for one fails."""

_MEASURED_BLOCKS = 8
_MEASURED_ROUNDS = 3


_Job: TypeAlias = tuple[Callable[[int, int], None], int, int]
"""What copies, from where, to where."""


class BlockMemory(Protocol):
    """KV pool and host tier as memory. Both methods return when the copy has ended, and may raise."""

    num_blocks: int
    num_host_blocks: int

    def copy_out(self, block_id: int, host_id: int) -> None:
        """Copy a block to a host block."""
        ...

    def copy_in(self, host_id: int, block_id: int) -> None:
        """Copy a host block to a block."""
        ...


class ArrayBlocks:
    """Pool and host tier in the same memory. numpy lets go of the interpreter while it copies."""

    def __init__(self, pool: NDArray[Any], num_host_blocks: int) -> None:
        """Take the pool, (blocks, ...), and make room for as many host blocks, whose pages come when used."""
        self.num_blocks = len(pool)
        self.num_host_blocks = num_host_blocks
        self._pool = pool
        self._host = np.empty((num_host_blocks, *pool.shape[1:]), pool.dtype)  # (host blocks, ...)

    def copy_out(self, block_id: int, host_id: int) -> None:
        """Copy a block to a host block."""
        self._host[host_id] = self._pool[block_id]

    def copy_in(self, host_id: int, block_id: int) -> None:
        """Copy a host block to a block."""
        self._pool[block_id] = self._host[host_id]


class BlockCopier:
    """The copies of a runner. Owned by the thread that computes, but for the copying itself.

    A step calls `begin`, computes, and calls `finish`. The copying thread starts with the first copy and ends
    when nobody has the copier any more.
    """

    def __init__(self, memory: BlockMemory, block_size: int) -> None:
        """Nothing is under way."""
        self.memory = memory
        self.num_waits = 0
        """Steps that waited for a copy before they could write a block."""
        self._block_size = block_size
        self._unread: dict[int, int] = {}  # block that is to be read -> number of the last copy that does
        self._loads: dict[int, int] = {}  # load -> number of its last copy
        self._num_queued = 0
        self._thread: CopyingThread | None = None
        # All below is shared with the copying thread.
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._num_ended = 0
        self._is_busy = False
        self._failure: Exception | None = None

    # ------------------------------------------------------------------ called by the step

    def begin(self, output: SchedulerOutput) -> None:
        """Start a step's copies; return when it may write its blocks.

        Raises `RuntimeError` if a copy, of this or an earlier step, has failed or does not end.
        """
        self._raise_failure()
        if output.swap_outs or output.loads:
            self._queue_copies(output)
        if self._unread:
            self._wait_until_read(output.scheduled)

    def finish(self, awaited_loads: Iterable[int]) -> list[int]:
        """Wait for some loads; return all that have ended since the last time. Raises as `begin`."""
        for load_id in awaited_loads:
            if load_id not in self._loads:
                raise EngineInvariantError(f"load {load_id} is awaited, but not under way")
            self._wait_for(self._loads[load_id])
        self._raise_failure()
        num_ended = self._num_ended
        finished = [load_id for load_id, number in self._loads.items() if number <= num_ended]
        for load_id in finished:
            del self._loads[load_id]
        return finished

    @property
    def is_reading(self) -> bool:
        """Whether a copy that reads a block may still be under way."""
        return any(number > self._num_ended for number in self._unread.values())

    def reset(self) -> None:
        """Forget all copies; return when none is under way. Raises `RuntimeError` if one does not end."""
        with self._changed:
            self._jobs.clear()
            if not self._changed.wait_for(lambda: not self._is_busy, COPY_TIMEOUT_S):
                raise _timeout_error()
            self._failure = None
            self._num_ended = self._num_queued
        self._unread.clear()
        self._loads.clear()

    def measure_ns(self) -> float:
        """Return what copying a block takes, out or in, once pages are there; overwrites the first blocks.

        Only while nothing is under way.
        """
        pairs = range(min(_MEASURED_BLOCKS, self.memory.num_blocks, self.memory.num_host_blocks))
        durations_ns = []
        for _ in range(_MEASURED_ROUNDS):
            started_ns = time.perf_counter_ns()
            for index in pairs:
                self.memory.copy_out(index, index)
            for index in pairs:
                self.memory.copy_in(index, index)
            durations_ns.append(time.perf_counter_ns() - started_ns)
        return min(durations_ns) / (2 * len(pairs))

    def _queue_copies(self, output: SchedulerOutput) -> None:
        jobs: list[_Job] = [
            (self.memory.copy_out, block_id, host_id) for block_id, host_id in output.swap_outs
        ]
        for number, (block_id, _) in enumerate(output.swap_outs, self._num_queued + 1):
            self._unread[block_id] = number
        for load in output.loads:
            jobs += [(self.memory.copy_in, host_id, block_id) for host_id, block_id in load.pairs]
            self._loads[load.load_id] = self._num_queued + len(jobs)
        self._num_queued += len(jobs)
        with self._changed:
            self._jobs.extend(jobs)
            if not self._is_busy:
                self._start()
                self._is_busy = True

    def _start(self) -> None:
        if self._thread is None:
            thread = CopyingThread()
            thread.start()  # raises if there can be no more threads
            weakref.finalize(self, thread.inbox.put, None).atexit = False  # `end_copying` does that
            self._thread = thread
        self._thread.inbox.put(self._drain)

    def _wait_until_read(self, scheduled: list[ScheduledSequence]) -> None:
        """Wait for the copies that read what the step will write, and for no others."""
        if max(self._unread.values()) <= self._num_ended:
            self._unread.clear()
            return
        last = max((self._unread.get(block_id, 0) for block_id in self._written_by(scheduled)), default=0)
        if last > self._num_ended:
            self.num_waits += 1
            self._wait_for(last)

    def _written_by(self, scheduled: list[ScheduledSequence]) -> Iterable[int]:
        for entry in scheduled:
            first = entry.num_computed_tokens // self._block_size
            end = -(-(entry.num_computed_tokens + entry.num_scheduled_tokens) // self._block_size)
            yield from entry.sequence.block_table[first:end]

    def _wait_for(self, number: int) -> None:
        """Wait until so many copies have ended."""
        with self._changed:
            is_over = self._changed.wait_for(
                lambda: self._num_ended >= number or self._failure is not None, COPY_TIMEOUT_S
            )
        self._raise_failure()
        if not is_over:
            raise _timeout_error()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError("Copying a block between KV pool and host tier failed.") from self._failure

    # ------------------------------------------------------------------ called in the copying thread

    def _drain(self) -> None:
        while self._copy_next():
            pass

    def _copy_next(self) -> bool:
        """Make the next copy; whether there was one. After one has failed, the rest is not made any more."""
        with self._changed:
            if not self._jobs:
                self._is_busy = False
                self._changed.notify_all()
                return False
            copy, source, target = self._jobs.popleft()
        failure = None
        try:
            copy(source, target)
        except Exception as error:  # noqa: BLE001 - whatever it is, the step has to fail with it
            failure = error
        with self._changed:
            if failure is None:
                self._num_ended += 1
            else:
                self._failure = failure
                self._jobs.clear()
            self._changed.notify_all()
        return True


def _timeout_error() -> RuntimeError:
    return RuntimeError(f"A copy between KV pool and host tier has not ended within {COPY_TIMEOUT_S:.0f} s.")
