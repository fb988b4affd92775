"""The engine as the event loop sees it: requests in, streams of tokens out, status and records."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from app.engine_commands import Abort, AppliedPolicies, SetPolicies, StopChoice, Submit
from app.engine_thread import EngineThread, Load, ThreadEvents
from app.errors import RETRY_AFTER_S, UnavailableError
from app.request_stream import RequestStream, StreamFailure
from engine.config import EngineConfig
from engine.engine_info import EngineInfo
from engine.errors import QueueFullError
from engine.records import StepRecord, StepResult, TokenOutput
from engine.sequence import EngineRequest

if TYPE_CHECKING:  # these modules import torch, which only the engine thread does
    from engine.loading import LoadedEngine, LoadProgress
    from engine.model.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_COMMANDS = 8192
"""Commands that may wait for the engine before new requests are refused: it has stalled then. Aborts
are always taken; there is at most one for each request."""

STOP_TIMEOUT_S = 20.0
"""How long `stop` waits for the step that the engine is in."""

HEARTBEAT_LIMIT_S = 30.0
"""A step that runs longer than this counts as stuck: neither alive nor ready."""


class HostStatus(StrEnum):
    """What the engine is doing, for people and for health checks."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True)
class StartProgress:
    """Progress where the engine thread reports none: it imports what loading needs, or starts over."""

    stage: str = "starting"
    fraction: float = 0.0


@dataclass(frozen=True)
class HostEvents:
    """What the host calls, always on the event loop and in order."""

    on_records: Callable[[list[StepRecord]], None]
    on_ready: Callable[[EngineConfig], None]
    on_status: Callable[[], None]
    on_cut: Callable[[list[str]], None] = lambda _: None
    """Gets the requests that are ended now because the server stops."""


class EngineHost:
    """Runs one engine in its own thread for one event loop.

    Attributes of interest: `status`, `progress` (while loading), `error` (why it failed), and, once
    loaded, `config` (resolved), `info` (how the model is run), `tokenizer` and `load_seconds`. They change
    on the event loop only.
    """

    def __init__(self, load: Load, model_name: str, events: HostEvents) -> None:
        """Nothing runs before `start`."""
        self.model_name = model_name
        self.status = HostStatus.LOADING
        self.progress: LoadProgress | StartProgress | None = StartProgress()
        self.error: str | None = None
        self._told_error: str | None = None
        self.config: EngineConfig | None = None
        self.info: EngineInfo | None = None
        self.tokenizer: Tokenizer | None = None
        self.load_seconds: float | None = None
        self._events = events
        self._status_listeners: list[Callable[[], None]] = []
        self._streams: dict[str, RequestStream] = {}
        self._admissions: dict[str, asyncio.Future[None]] = {}
        self._is_stopping = False
        self._is_starting_over = False
        self._preparing: set[asyncio.Timeout] = set()
        self._nothing_open = asyncio.Event()
        self._nothing_open.set()
        self._thread = EngineThread(
            load,
            ThreadEvents(
                self._on_progress,
                self._on_loaded,
                self._on_results,
                self._on_failed,
                self._on_lost,
                self._on_found,
            ),
        )

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the engine thread last began a turn of its loop, or a step."""
        return time.monotonic() - self._thread.heartbeat_s

    @property
    def is_responsive(self) -> bool:
        """Whether the engine thread turns; loading counts as turning."""
        if self.status is HostStatus.FAILED:
            return False
        return self.config is None or self._is_starting_over or self.heartbeat_age_s < HEARTBEAT_LIMIT_S

    @property
    def num_open(self) -> int:
        """Requests that have not ended, those included that the engine does not have yet."""
        # Whoever waits for admission is still preparing.
        return len(self._streams.keys() - self._admissions.keys()) + len(self._preparing)

    def check_available(self) -> None:
        """Raise `UnavailableError` unless requests can be taken now."""
        if self.status is HostStatus.FAILED:
            raise UnavailableError(
                f"The engine has failed and takes no requests: {self._told_error}",
                code="engine_failed",
                retry_after_s=None,
            )
        if self.status is HostStatus.DRAINING:
            raise _make_shutdown_error()
        if self.config is None:
            raise UnavailableError(
                f"The model is still loading{self._describe_progress()}; try again in a moment.",
                code="model_loading",
                retry_after_s=RETRY_AFTER_S,
            )

    def _describe_progress(self) -> str:
        if self.progress is None:
            return ""
        return f" ({self.progress.stage}, {self.progress.fraction:.0%})"

    def add_status_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` on the loop whenever `status` or `progress` has changed."""
        self._status_listeners.append(listener)

    def start(self) -> None:
        """Start the engine thread, which loads the model first. Call on the event loop."""
        self._thread.start()

    async def stop(self) -> None:
        """End the engine thread. Streams that are still open get a terminal item."""
        await self.drain(0.0)
        await self._thread.stop(STOP_TIMEOUT_S)

    @property
    def activity(self) -> str:
        """What the engine thread does that can take long, for a sentence about one that does not end."""
        if self.config is None:
            return "is still loading the model"
        return "is still starting over" if self._is_starting_over else "is stuck in a step"

    @property
    def has_thread(self) -> bool:
        """Whether the engine thread runs; after `stop` that means that it is stuck."""
        return self._thread.is_alive

    @asynccontextmanager
    async def preparing(self) -> AsyncIterator[None]:
        """Around all that comes before `submit`: reading a request, turning it into tokens.

        Raises `UnavailableError` when the server begins to stop, since the engine would not take the
        request any more.
        """
        if self._is_stopping:
            raise _make_shutdown_error()
        try:
            async with asyncio.timeout(None) as scope:
                self._preparing.add(scope)
                try:
                    yield
                finally:
                    self._preparing.discard(scope)
        except TimeoutError:
            if scope.expired():
                raise _make_shutdown_error() from None
            raise

    async def submit(self, requests: list[EngineRequest]) -> RequestStream:
        """Hand all choices of one request to the engine and return the stream of their tokens.

        Returns once the engine has taken them, at most one step later. Raises `RequestError`
        (`ContextLengthError`, `QueueFullError`) if it refuses one of them; then none runs. Raises
        `UnavailableError` if there is no engine to take them. The caller must `release` the request
        in the end, whatever happens.
        """
        self.check_available()
        if self._thread.num_commands >= MAX_COMMANDS:
            raise QueueFullError("The engine does not keep up; try again later.", code="queue_full")
        request_id = requests[0].request_id
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._admissions[request_id] = admitted
        stream = self._streams[request_id] = RequestStream(request_id, len(requests))
        self._nothing_open.clear()
        self._thread.send(Submit(requests, admitted))
        try:
            await admitted
        except BaseException:
            self.release(request_id)
            raise
        finally:
            del self._admissions[request_id]
        return stream

    def stop_choice(self, request_id: str, choice_index: int) -> None:
        """End one choice because one of its stop strings has appeared."""
        if request_id in self._streams:
            self._thread.send(StopChoice(request_id, choice_index))

    def abort(self, request_id: str) -> None:
        """End a request, running or waiting; its stream gets its terminal items. Safe to repeat."""
        if request_id in self._streams:
            self._thread.send(Abort(request_id))

    def release(self, request_id: str) -> None:
        """Forget a request that nobody reads any more, ending it if it still runs. Safe to repeat."""
        stream = self._forget(request_id)
        if stream is not None and not stream.is_closed:
            self._thread.send(Abort(request_id))

    async def set_policies(self, changes: dict[str, str]) -> AppliedPolicies:
        """Have the engine decide by other policies; fields of `Policies` that are not named stay as they are.

        Returns once the record that says so is published. Raises `ConfigError` for names that the engine does
        not know or that do not go together, and `UnavailableError` if there is no engine.
        """
        self.check_available()
        applied: asyncio.Future[AppliedPolicies] = asyncio.get_running_loop().create_future()
        self._thread.send(SetPolicies(changes, applied))
        return await applied

    def begin_drain(self) -> None:
        """Take no more requests; open ones go on."""
        if self.status in {HostStatus.LOADING, HostStatus.READY}:
            self._set_status(HostStatus.DRAINING)
        self._is_stopping = True
        ended, self._preparing = self._preparing, set()
        for scope in ended:
            scope.reschedule(asyncio.get_running_loop().time())

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests, let open ones end for `timeout_s`, then end the rest."""
        self.begin_drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._nothing_open.wait()
        self._events.on_cut(list(self._streams))
        self._close_streams(
            StreamFailure("server_shutdown", "The server is shutting down; the answer is not complete.")
        )

    def _forget(self, request_id: str) -> RequestStream | None:
        stream = self._streams.pop(request_id, None)
        if not self._streams:
            self._nothing_open.set()
        return stream

    def _close_streams(self, failure: StreamFailure) -> None:
        for admitted in self._admissions.values():
            if not admitted.done():
                admitted.set_exception(
                    UnavailableError(failure.message, code=failure.code, retry_after_s=RETRY_AFTER_S)
                )
        for request_id, stream in list(self._streams.items()):
            stream.fail(failure)
            self._forget(request_id)
            self._thread.send(Abort(request_id))

    def _set_status(self, status: HostStatus, error: str | None = None) -> None:
        self.status = status
        self.error = error
        self._notify_status()

    def _notify_status(self) -> None:
        self._events.on_status()
        for listener in self._status_listeners:
            listener()

    def _on_progress(self, progress: "LoadProgress") -> None:
        if self.status is HostStatus.LOADING:
            self.progress = progress
            self._notify_status()

    def _on_loaded(self, loaded: "LoadedEngine", seconds: float) -> None:
        self.config = loaded.core.config
        self.info = loaded.info
        self.tokenizer = loaded.tokenizer
        self.load_seconds = seconds
        self.progress = None
        self._events.on_ready(loaded.core.config)
        if self.status is HostStatus.LOADING:
            self.status = HostStatus.READY
        self._notify_status()

    def _on_failed(self, error: str, told: str) -> None:
        self.progress = None
        self._is_starting_over = False
        self._told_error = told
        self._set_status(HostStatus.FAILED, error)
        self._close_streams(StreamFailure("engine_error", told))

    def _on_lost(self) -> None:
        """Take requests, which wait, but do not count as ready while a part of the engine is loaded again."""
        self._is_starting_over = True
        if self.status is HostStatus.READY:
            self.progress = StartProgress("starting over")
            self._set_status(HostStatus.LOADING)

    def _on_found(self) -> None:
        self._is_starting_over = False
        self.progress = None
        if self.status is HostStatus.LOADING:
            self._set_status(HostStatus.READY)

    def _on_results(self, results: list[tuple[StepResult, str | None]]) -> None:
        try:
            self._events.on_records([result.record for result, _ in results])
        except Exception:  # a fault of an observer must not cost anybody an answer
            logger.exception("Step records could not be published")
        for result, error in results:
            for output in result.outputs:
                self._route(output, error)

    def _route(self, output: TokenOutput, error: str | None) -> None:
        stream = self._streams.get(output.request_id)
        if stream is None:
            return
        if error is not None and output.finish_reason is not None:
            stream.failure = StreamFailure("engine_error", error)
        stream.put(output)
        if stream.is_closed:
            self._forget(output.request_id)


def _make_shutdown_error() -> UnavailableError:
    return UnavailableError(
        "The server is shutting down and takes no requests.",
        code="server_shutdown",
        retry_after_s=RETRY_AFTER_S,
    )
