"""Fans the engine's records out to the sockets that watch it.

`publish` never waits for anybody: it folds the records and tells the subscriptions that wait for news.
Each subscription decides for itself when its client can take the next message.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from app.realtime.decisions import DecisionLog
from app.realtime.frames import MAX_FPS, Deflater, Frame, Hello, encode_message, make_hello, parse_ack
from app.realtime.journal import Cursor, Journal
from engine.config import EngineConfig
from engine.engine_info import EngineInfo
from engine.errors import EngineInvariantError
from engine.records import StepRecord
from engine.snapshot import EngineSnapshot

logger = logging.getLogger(__name__)

MAX_SUBSCRIPTIONS = 64
MAX_INBOUND_BYTES = 16 * 1024
"""For the server, which refuses a longer message while it reads it; an ACK has 12 bytes."""

MAX_UNACKNOWLEDGED = 2
"""Messages on their way to one client. Two, so that one travels while the other is painted."""

SILENCE_S = 60.0
"""A client that acknowledges nothing for so long is dropped."""

HIDDEN_FPS = 1
_CODE_FAILED = 1011
_MS_PER_NS = 1e-6


class SubscriptionEndedError(Exception):
    """The socket is to be closed with `code` because of `reason`."""

    def __init__(self, code: int, reason: str) -> None:
        """Keep the WebSocket close code and the reason."""
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason


class Resume(msgspec.Struct, frozen=True):
    """Where a page left off: the newest step row it has, and of which server run (None: of this one)."""

    after: int | None = None
    session: str | None = None


class EventHub:
    """The live side of one server run. Lives on the event loop; only `publish` and its like change it.

    `snapshot` is None until `open`. `clock` gives monotonic seconds, `wall_ns` Unix time.
    """

    def __init__(
        self,
        session_id: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
        silence_s: float = SILENCE_S,
    ) -> None:
        """Start without an engine: clients get a HELLO that says `loading`."""
        self.session_id = session_id
        self.status = "loading"
        self.model_name: str | None = None
        self.info: EngineInfo | None = None
        self.journal: Journal | None = None
        self.decisions = DecisionLog()
        self.clock = clock
        self.silence_s = silence_s
        self.deflater = Deflater()
        self._wall_ns = wall_ns
        self._config: EngineConfig | None = None
        self._subscriptions: set[Subscription] = set()
        self._change_listeners: set[Callable[[set[int]], None]] = set()
        self._on_record: Callable[[StepRecord, EngineSnapshot], None] | None = None
        self._newest_message: tuple[list[Frame], bytes] = ([], b"")
        self.state_turn = asyncio.Lock()
        """Held while a big state document is made."""
        self.ending: SubscriptionEndedError | None = None
        """Why no client is served any more, None while they are."""

    @property
    def snapshot(self) -> EngineSnapshot | None:
        """The engine's state after the newest record, None while the model loads."""
        return self.journal.snapshot if self.journal else None

    @property
    def has_failed(self) -> bool:
        """Whether the picture is wrong for good: a bug, logged when it was found."""
        return self.ending is not None and self.ending.code == _CODE_FAILED

    @property
    def num_clients(self) -> int:
        """Clients that are served now."""
        return len(self._subscriptions)

    # ---------------------------------------------------------------- the engine's side

    def open(
        self,
        config: EngineConfig,
        model_name: str,
        first_snapshot: EngineSnapshot | None = None,
        *,
        info: EngineInfo | None = None,
    ) -> None:
        """Begin: the engine is ready, its first record comes next. Clients get HELLO and KEYFRAME.

        `info` says how the model is run.
        """
        if self.journal is not None:
            raise EngineInvariantError("the hub is open already")
        self._config, self.model_name, self.info = config, model_name, info
        self.journal = Journal(config, first_snapshot)
        if self.status == "loading":  # it may be draining already
            self.status = "ready"
        self._tell_status()

    def forward_records(self, on_record: Callable[[StepRecord, EngineSnapshot], None]) -> None:
        """Call `on_record` with each record and the state after it; it must be quick and raise nothing."""
        self._on_record = on_record

    def set_status(self, status: str) -> None:
        """Tell all clients that the engine is `loading`, `ready`, `failed` or `draining`, if that is new."""
        if status != self.status:
            self.status = status
            self._tell_status()

    def _tell_status(self) -> None:
        for subscription in self._subscriptions:
            subscription.owe_hello()

    def publish(self, records: list[StepRecord]) -> None:
        """Take the next records, also after `close`: what ends with the server is on record.

        Waits for nobody and raises nothing that would harm the answers.
        """
        if self.journal is None:
            raise EngineInvariantError("a record came before the hub was opened")
        if self.has_failed:
            return
        try:
            for record in records:
                self.decisions.note(self.journal.snapshot, record)
                changed = self.journal.fold(record)
                if self._on_record is not None:
                    self._on_record(record, self.journal.snapshot)
                for listener in self._change_listeners:
                    listener(changed)
        except Exception:
            # The picture would be wrong from here on. The answers are not: they do not come from it.
            logger.exception("The live view does not add up and is closed until the server restarts")
            self._end(SubscriptionEndedError(_CODE_FAILED, "the live view has failed"))
            return
        for subscription in self._subscriptions:
            subscription.tell_news()

    def close(self) -> None:
        """End all subscriptions because the server stops; safe to repeat."""
        if self.ending is None:
            self._end(SubscriptionEndedError(1012, "the server stops"))

    def _end(self, ending: SubscriptionEndedError) -> None:
        self.ending = ending
        for subscription in self._subscriptions:
            subscription.wake()

    # ---------------------------------------------------------------- the clients' side

    @contextmanager
    def subscribe(self, resume: Resume) -> Iterator["Subscription"]:
        """Serve one client for the length of the block; raises `SubscriptionEndedError` if it cannot be."""
        if self.ending is not None:
            raise self.ending
        if len(self._subscriptions) >= MAX_SUBSCRIPTIONS:
            raise SubscriptionEndedError(1013, f"{MAX_SUBSCRIPTIONS} pages are watching already")
        subscription = Subscription(self, resume)
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)

    @contextmanager
    def listen(self, on_changed: Callable[[set[int]], None]) -> Iterator[None]:
        """Call `on_changed` with the changed blocks of each record for the length of the block."""
        self._change_listeners.add(on_changed)
        try:
            yield
        finally:
            self._change_listeners.discard(on_changed)

    async def encode(self, frames: list[Frame]) -> bytes:
        """Return frames as one message; clients that were given the same ones share it."""
        if self._newest_message[0] is frames:
            return self._newest_message[1]
        message = await encode_message(frames, self.deflater)
        self._newest_message = (frames, message)
        return message

    def make_hello(self) -> Frame:
        """Describe this server run as of now."""
        hello = Hello(
            session=self.session_id,
            status=self.status,
            model=self.model_name,
            step=self.snapshot.step if self.snapshot else 0,
            config=self._config,
            engine=self.info,
        )
        return make_hello(hello, self._wall_ns() * _MS_PER_NS)


class Subscription:
    """One client: a cursor into the journal, and what is known of the client's pace."""

    def __init__(self, hub: EventHub, resume: Resume) -> None:
        """Begin with a HELLO owed."""
        self._hub = hub
        self._resume = resume
        self._cursor: Cursor | None = None
        self._owes_hello = True
        self._sent = 0
        self._painted = 0
        self._fps = MAX_FPS
        self._next_at = 0.0
        self._heard_at = 0.0
        self._given_at: float | None = None  # when the message that is being sent was given
        self._wake = asyncio.Event()
        self._wants_news = False
        self._wants_ack = False

    def wake(self) -> None:
        """Make `next_message` look again."""
        self._wake.set()

    def tell_news(self) -> None:
        """Wake the client up if news is what it waits for."""
        if self._wants_news:
            self._wake.set()

    def owe_hello(self) -> None:
        """Send a HELLO with the next message."""
        self._owes_hello = True
        self._wake.set()

    def on_message(self, data: object) -> None:
        """Take what the client sent; raises `SubscriptionEndedError` if it is not an ACK."""
        try:
            ack = parse_ack(data)
        except ValueError as error:
            raise SubscriptionEndedError(1008, str(error)) from None
        if not self._painted <= ack.painted <= self._sent:
            raise SubscriptionEndedError(1008, f"{ack.painted} messages painted of {self._sent}")
        self._painted = ack.painted
        self._heard_at = self._hub.clock()
        fps = min(ack.fps, HIDDEN_FPS) if ack.hidden else ack.fps
        if fps != self._fps:
            self._next_at += 1 / fps - 1 / self._fps
            self._fps = fps
            self._wake.set()
        if self._wants_ack:
            self._wake.set()

    def check_silence(self) -> float:
        """Return how long to wait before looking again; raises `SubscriptionEndedError` if it was too long.

        Once in a while is enough: a timer for each message would cost more than the message.
        """
        silence_s, now = self._hub.silence_s, self._hub.clock()
        heard_at = self._heard_at if self._sent > self._painted else now
        given_at = now if self._given_at is None else self._given_at
        if heard_at + silence_s <= now:
            raise SubscriptionEndedError(1013, f"no answer for {silence_s:g} s")
        if given_at + silence_s <= now:
            raise SubscriptionEndedError(1013, f"nothing taken for {silence_s:g} s")
        return min(heard_at, given_at) + silence_s - now

    async def next_message(self) -> bytes:
        """Wait until the client can take a message and there is one; raises `SubscriptionEndedError`.

        The message counts as being sent until the next call.
        """
        self._given_at = None
        while (wait_s := self._wait_s()) != 0:
            self._wake.clear()
            try:
                if wait_s is None:
                    await self._wake.wait()
                    continue
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            except TimeoutError:
                continue
            finally:
                self._wants_news = self._wants_ack = False
        message = await self._hub.encode(self.take())
        self._given_at = self._hub.clock()
        return message

    def take(self) -> list[Frame]:
        """Return the frames that bring the client up to date, and count them as one message sent."""
        frames: list[Frame] = []
        if self._owes_hello:
            frames.append(self._hub.make_hello())
            self._owes_hello = False
        journal = self._hub.journal
        if journal is not None:
            if self._cursor is None:
                self._cursor = journal.start(self._resume_after())
            if journal.is_behind(self._cursor):
                news = journal.take(self._cursor)
                frames = frames + news if frames else news  # it is shared
        now = self._hub.clock()
        if self._sent == self._painted:
            self._heard_at = now  # from here on it owes an answer
        self._sent += 1
        self._next_at = now + 1 / self._fps
        return frames

    def is_due(self) -> bool:
        """Whether a message may be sent now; raises `SubscriptionEndedError`."""
        return self._wait_s() == 0

    def _wait_s(self) -> float | None:
        """Return how long to wait for a change of mind: 0 to send now, None until woken."""
        if self._hub.ending is not None:
            raise self._hub.ending
        if self._sent - self._painted >= MAX_UNACKNOWLEDGED:
            self._wants_ack = True
            return None
        if not self._has_news():
            self._wants_news = True
            return None
        return max(0.0, self._next_at - self._hub.clock())

    def _has_news(self) -> bool:
        journal = self._hub.journal
        if self._owes_hello or journal is None:
            return self._owes_hello
        return self._cursor is None or journal.is_behind(self._cursor)

    def _resume_after(self) -> int | None:
        is_ours = self._resume.session in (None, self._hub.session_id)
        return self._resume.after if is_ours else None
