"""The thread that owns the engine: sequences, blocks and tensors are touched by nothing else.

Commands come in through one queue. What a step gives goes back through one bounded buffer that a
single scheduled callback on the event loop drains, whatever the number of tokens. When the loop
falls behind by `OUTBOX_STEPS` steps the engine waits for it: nothing is lost, nothing grows.
"""

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from app.engine_commands import Abort, AppliedPolicies, Command, SetPolicies, StopChoice, Submit, Wake
from app.errors import InterruptedAnswerError
from engine.core import EngineCore
from engine.errors import EngineDeadError, EngineError, RankError
from engine.records import Policies, Stalled, StepResult

if TYPE_CHECKING:  # these modules import torch, which only `load` may do, in the engine thread
    from engine.loading import LoadedEngine, LoadProgress

logger = logging.getLogger(__name__)

OUTBOX_STEPS = 64
"""Steps that may wait for the event loop before the engine waits for it."""

IDLE_TURN_S = 1.0
"""An idle engine turns its loop this often, which keeps its heartbeat young."""

CHECK_INTERVAL_S = 10.0
"""An idle engine checks its books at most this often, and only after a change."""

MAX_CHECKED_BLOCKS = 2**17
"""Checking a larger pool would make the next request wait: 0.5 µs a block."""

MAX_FAILURES = 3
FAILURE_WINDOW_S = 60.0
"""So many failures, in steps or between them, within so many seconds end the engine for good."""

_STOPPED = "The engine has stopped."

STEP_FAILED = "The engine failed while computing; the log says why."
"""What clients are told: the exception's own text is for the operator."""

GIVEN_UP = "The engine failed and could not start over; the log says why."

TOO_MANY_FAILURES = f"The engine failed {MAX_FAILURES} times within a minute; the log says why."

Load = Callable[[Callable[["LoadProgress"], None]], "LoadedEngine"]
"""Builds the engine, in the engine thread; it reports how far it is."""


@dataclass(frozen=True)
class ThreadEvents:
    """What the thread reports; each is called on the event loop, in order."""

    on_progress: Callable[["LoadProgress"], None]
    on_loaded: Callable[["LoadedEngine", float], None]
    """With the seconds that loading took."""
    on_results: Callable[[list[tuple[StepResult, str | None]]], None]
    """With what clients are told, where a step failed and ended everything."""
    on_failed: Callable[[str, str], None]
    """The engine is gone for good: why, for the operator, and what clients are told of it."""
    on_lost: Callable[[], None] = lambda: None
    """The engine has lost something that it gets back now; it takes as long as loading."""
    on_found: Callable[[], None] = lambda: None
    """It has it back."""


class LoadAbandonedError(EngineError):
    """The server stops while the model, or a lost part of it, is still loading."""


class EngineThread:
    """Loads an engine and runs its steps until `stop`."""

    def __init__(self, load: Load, events: ThreadEvents) -> None:
        """Nothing runs before `start`."""
        self.heartbeat_s = time.monotonic()
        """Monotonic time at which the thread last began a turn of its loop, or a step."""
        self._load = load
        self._events = events
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._outbox: list[tuple[StepResult, str | None]] = []
        self._outbox_changed = threading.Condition()
        self._drain_is_scheduled = False
        self._stopping = threading.Event()
        self._failures: deque[float] = deque(maxlen=MAX_FAILURES)
        self._unrecorded: list[tuple[asyncio.Future[AppliedPolicies], Policies]] = []
        """Changes of policies that are in no record yet."""
        self._checked_s = 0.0
        self._has_changed = True
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    # ---- called on the event loop ---------------------------------------------------------------

    def start(self) -> None:
        """Start the thread; it reports to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="pageglass-engine", daemon=False)
        self._thread.start()

    def send(self, command: Command) -> None:
        """Queue a command."""
        self._commands.put(command)

    @property
    def num_commands(self) -> int:
        """Commands that have not been looked at."""
        return self._commands.qsize()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    async def stop(self, timeout_s: float) -> None:
        """End the thread after the step that it is in; gives up waiting after `timeout_s`."""
        self._stopping.set()
        self._commands.put(Wake())
        with self._outbox_changed:
            self._outbox_changed.notify_all()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, timeout_s)

    def _drain_outbox(self) -> None:
        with self._outbox_changed:
            self._drain_is_scheduled = False
            results, self._outbox = self._outbox, []
            self._outbox_changed.notify_all()
        self._events.on_results(results)

    # ---- called in the thread -------------------------------------------------------------------

    def _post(self, callback: Callable[..., None], *args: object) -> None:
        """Run `callback` on the loop, unless the loop is gone."""
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop was closed without `stop`: nobody is left to tell
            self._stopping.set()

    def _run(self) -> None:
        core = self._load_core()
        try:
            while core is not None and not self._stopping.is_set():
                self.heartbeat_s = time.monotonic()
                if not self._turn(core):
                    break
            self._end_commands(core)
        except Exception as error:
            logger.exception("The engine thread ended with %s", type(error).__name__)
            self._give_up(STEP_FAILED)
        finally:
            self._end_commands(None)
            if core is not None:
                core.close()

    def _load_core(self) -> EngineCore | None:
        started_s = time.monotonic()
        try:
            loaded = self._load(self._report_progress)
        except LoadAbandonedError:
            return None
        except EngineError as error:
            self._give_up(str(error))
            return None
        except Exception as error:
            logger.exception("Loading the model failed")
            self._give_up(f"Loading the model failed: {_describe(error)}")
            return None
        self.heartbeat_s = time.monotonic()
        self._post(self._events.on_loaded, loaded, self.heartbeat_s - started_s)
        return loaded.core

    def _report_progress(self, progress: "LoadProgress") -> None:
        self._check_wanted()
        self._post(self._events.on_progress, progress)

    def _check_wanted(self) -> None:
        """Raise if the server stops: what is being loaded is not wanted any more."""
        if self._stopping.is_set():
            raise LoadAbandonedError("The server stops.")

    def _give_up(self, error: str, told: str | None = None) -> None:
        self._post(self._events.on_failed, error, error if told is None else told)

    def _turn(self, core: EngineCore) -> bool:
        """Take waiting commands and run one step; whether the engine goes on."""
        try:
            self._take_commands(core)
            core.check_runner()
            result = core.step() if core.has_work else core.flush()
            if result is not None:
                self._emit(result)
            self._check_when_idle(core)
        except RankError as error:  # says all; any other error is looked for in the code
            logger.warning("%s Open requests end", error)
            return self._recovers(core, error)
        except Exception as error:
            logger.exception("A step failed; its requests end")
            return self._recovers(core, error)
        return True

    def _recovers(self, core: EngineCore, error: Exception) -> bool:
        """End all requests after an error and start over; whether the engine goes on."""
        is_lost = core.runner.loss is not None
        if is_lost:
            self._post(self._events.on_lost)
        self._emit(_end_all(core, type(error).__name__), STEP_FAILED)
        is_ready = self._may_go_on() and self._starts_over(core)
        self.heartbeat_s = time.monotonic()  # before the loop hears of it: starting over is no silence
        if is_lost and is_ready:
            self._post(self._events.on_found)
        return is_ready

    def _starts_over(self, core: EngineCore) -> bool:
        """Make the engine ready for requests again, once all ends have been told; whether it is."""
        logger.info("The engine starts over")
        try:
            core.reset_runner(self._check_wanted)
        except LoadAbandonedError:
            return False
        except RankError as error:
            logger.error("%s The engine could not start over; it is given up", error)  # noqa: TRY400 - says all
            self._give_up(f"The engine failed and could not start over: {error}", GIVEN_UP)
            return False
        except Exception:
            logger.exception("The engine could not start over after a failure; it is given up")
            self._give_up(GIVEN_UP)
            return False
        return True

    def _check_when_idle(self, core: EngineCore) -> None:
        """Look for leaked blocks, now and then, while nobody waits for the engine."""
        if core.has_work or not self._has_changed or core.config.num_blocks > MAX_CHECKED_BLOCKS:
            return
        if self.heartbeat_s - self._checked_s >= CHECK_INTERVAL_S:
            self._checked_s, self._has_changed = self.heartbeat_s, False
            core.check_integrity()

    def _may_go_on(self) -> bool:
        """Note a failure; whether the engine is still wanted, and has not failed too often."""
        if self._stopping.is_set():
            return False
        self._failures.append(time.monotonic())
        if len(self._failures) < MAX_FAILURES or self._failures[-1] - self._failures[0] > FAILURE_WINDOW_S:
            return True
        logger.error("The engine failed %d times within a minute; it is given up", MAX_FAILURES)
        self._give_up(TOO_MANY_FAILURES)
        return False

    def _take_commands(self, core: EngineCore) -> None:
        """Apply all waiting commands; an idle engine waits for one."""
        try:
            if not core.has_work and not self._stopping.is_set():
                self._apply(core, self._commands.get(timeout=IDLE_TURN_S))
            while True:
                self._apply(core, self._commands.get_nowait())
        except queue.Empty:
            return

    def _emit(self, result: StepResult, error: str | None = None) -> None:
        """Hand a step's result to the loop; waits while too many are on their way."""
        self._has_changed = True
        for event in result.record.events:
            if isinstance(event, Stalled):
                logger.error("There was work but nothing to do; the first request was ended: %s", event)
        with self._outbox_changed:
            while len(self._outbox) >= OUTBOX_STEPS and not self._stopping.is_set():
                self._outbox_changed.wait(IDLE_TURN_S)
                self.heartbeat_s = time.monotonic()
            self._outbox.append((result, error))
            is_first, self._drain_is_scheduled = not self._drain_is_scheduled, True
        if is_first:
            self._post(self._drain_outbox)
        # After the record: whoever is told finds it in the state already.
        told, self._unrecorded = self._unrecorded, []
        for applied, policies in told:
            self._post(_settle, applied, AppliedPolicies(policies, result.record.step))

    def _apply(self, core: EngineCore, command: Command) -> None:
        match command:
            case Submit(requests, admitted):
                if self._try(admitted, partial(core.add_requests, requests)):
                    self._post(_settle, admitted, None)
            case SetPolicies(changes, applied):
                if self._try(applied, partial(_change_policies, core, changes)):
                    self._unrecorded.append((applied, core.policies))
            case Abort(request_id):
                core.abort(request_id)
            case StopChoice(request_id, choice_index):
                core.stop(request_id, choice_index)
            case Wake():
                pass

    def _try(self, awaited: "asyncio.Future[Any]", action: Callable[[], None]) -> bool:
        """Do what somebody waits for; a refusal is told. Return whether it was done."""
        try:
            action()
        except EngineError as error:
            self._post(_fail, awaited, error)
            return False
        except Exception:
            self._post(_fail, awaited, InterruptedAnswerError(STEP_FAILED, code="engine_error"))
            raise
        return True

    def _end_commands(self, core: EngineCore | None) -> None:
        """Answer commands that came too late; put on record what ends with the engine."""
        try:
            while True:
                match self._commands.get_nowait():
                    case Submit(_, awaited) | SetPolicies(_, awaited):
                        self._post(_fail, awaited, EngineDeadError(_STOPPED))
                    case Abort(request_id) if core is not None:
                        core.abort(request_id)
        except queue.Empty:
            result = core.flush() if core is not None and not core.has_work else None
        if result is not None:
            self._emit(result)
        if core is None:
            for awaited, _ in self._unrecorded:
                self._post(_fail, awaited, EngineDeadError(_STOPPED))
            self._unrecorded.clear()


def _change_policies(core: EngineCore, changes: dict[str, str]) -> None:
    core.set_policies(msgspec.structs.replace(core.policies, **changes))


def _end_all(core: EngineCore, error: str) -> StepResult:
    """End everything. What was out of memory for the step may be so for its end, but hardly twice."""
    try:
        return core.fail_all(error)
    except Exception:
        logger.exception("Ending the requests of a failed step failed; once more")
        return core.fail_all(error)


def _settle(awaited: "asyncio.Future[Any]", value: object) -> None:
    if not awaited.done():  # else the client has left
        awaited.set_result(value)


def _fail(awaited: "asyncio.Future[Any]", error: EngineError) -> None:
    if not awaited.done():
        awaited.set_exception(error)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
