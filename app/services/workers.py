"""Work off the event loop, in few threads and with few waiting, that can never keep the process alive.

The threads are daemons: a process that ends does not wait for one that is stuck, which the standard
library's executors do. A call that exceeds its deadline is given up: Python code is interrupted, since a
thread that loops would slow down all others for ever. What cannot be interrupted (a call into a library)
counts as lost until it comes back.
"""

import asyncio
import ctypes
import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from engine.errors import EngineError, QueueFullError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class DeadlineError(EngineError):
    """A call took longer than it may."""


class WorkersLostError(EngineError):
    """All workers are stuck in calls that were given up."""


class _InterruptedCall(SystemExit):
    """Raised inside a call that was given up; of this kind because threads end quietly with it."""


@dataclass
class _Call:
    """A function that runs in a thread, and who waits for it."""

    function: Callable[[], Any]
    done: asyncio.Future[Any]
    deadline: asyncio.TimerHandle | None = None
    thread: threading.Thread | None = None
    is_lost: bool = False
    has_returned: bool = False


class Workers:
    """At most `num_workers` threads at once and `max_waiting` calls that wait for one.

    Lives on one event loop. `name` is that of the threads and in the log.
    """

    def __init__(self, name: str, *, num_workers: int, max_waiting: int) -> None:
        """No thread runs before the first call."""
        self._name = name
        self._num_workers = num_workers
        self._max_waiting = max_waiting
        self._num_running = 0
        self._num_lost = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def run(self, function: Callable[[], T], *, deadline_s: float | None = None) -> T:
        """Return what `function` returns, called in a thread; raises what it raises.

        Raises `QueueFullError` if too many wait, `DeadlineError` if the call itself takes longer than
        `deadline_s`, `WorkersLostError` if no thread is left. Cancelling gives up waiting at once; a call
        that has begun still occupies its thread until it returns.
        """
        await self._take_turn()
        call = _Call(function, asyncio.get_running_loop().create_future())
        if deadline_s is not None:
            call.deadline = call.done.get_loop().call_later(deadline_s, self._give_up, call)
        call.thread = threading.Thread(target=self._execute, args=(call,), name=self._name, daemon=True)
        call.thread.start()
        result: T = await call.done
        return result

    async def _take_turn(self) -> None:
        if self._num_lost >= self._num_workers:
            raise WorkersLostError(f"All {self._num_workers} threads of {self._name} are stuck.")
        if self._num_running < self._num_workers:
            self._num_running += 1
            return
        if len(self._waiting) >= self._max_waiting:
            raise QueueFullError("Too many requests are being prepared; try again later.", code="queue_full")
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._pass_turn()  # it came while the waiter was being cancelled
            else:
                with suppress(ValueError):
                    self._waiting.remove(turn)
            raise

    def _pass_turn(self) -> None:
        """Give a place that has become free to the first that still waits."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._num_running -= 1

    def _execute(self, call: _Call) -> None:
        try:
            result, error = None, None
            try:
                result = call.function()
            except BaseException as raised:  # noqa: BLE001 - it belongs to whoever waits
                error = raised
            self._post(call, result, error)
        except _InterruptedCall as late:  # the call had returned already
            self._post(call, None, late)

    def _post(self, call: _Call, result: object, error: BaseException | None) -> None:
        with suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits any more
            call.done.get_loop().call_soon_threadsafe(self._finish, call, result, error)

    def _finish(self, call: _Call, result: object, error: BaseException | None) -> None:
        if call.has_returned:
            return
        call.has_returned = True
        if call.deadline is not None:
            call.deadline.cancel()
        if call.is_lost:
            self._num_lost -= 1
        self._pass_turn()
        if call.done.done():
            return
        if error is None:
            call.done.set_result(result)
        else:
            call.done.set_exception(error)

    def _give_up(self, call: _Call) -> None:
        call.is_lost = True
        self._num_lost += 1
        logger.error(
            "A call in %s takes too long and was given up; %d of %d threads are stuck",
            self._name,
            self._num_lost,
            self._num_workers,
        )
        _interrupt(call)
        if not call.done.done():
            call.done.set_exception(DeadlineError("The call took too long."))
        while self._num_lost >= self._num_workers and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(WorkersLostError(f"All threads of {self._name} are stuck."))


def _interrupt(call: _Call) -> None:
    """Raise `_InterruptedCall` in the thread of a call, before its next step of Python code."""
    assert call.thread is not None  # noqa: S101 - set before the deadline can pass
    if call.thread.ident is not None:
        thread_id = ctypes.c_ulong(call.thread.ident)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread_id, ctypes.py_object(_InterruptedCall))
