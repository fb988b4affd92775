"""The engine's records on their way through live view and history, in a thread as the server's loop is.

What a step gives goes to the event loop, which folds it, encodes it for the history as it is written every
moment, every 256 steps also in the form that stays, and brings the pages that watch up to date: all that
`pageglass serve` does with a record, except for sockets and the database.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from app.history.record_codec import encode_columns, encode_plain
from app.realtime.hub import EventHub, Resume, Subscription
from engine.config import EngineConfig
from engine.records import StepRecord
from tests.support.wire import make_ack

_CHUNK_STEPS = 256


class Watchers:
    """An event loop in a thread of its own, with pages that take and acknowledge every message."""

    def __init__(self, config: EngineConfig, num_pages: int) -> None:
        """Nothing runs before `start`."""
        self.num_messages = 0
        self.num_bytes = 0
        self._config = config
        self._num_pages = num_pages
        self._lock = threading.Lock()
        self._outbox: list[StepRecord] = []
        self._is_scheduled = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="watchers", daemon=True)
        self._is_ready = threading.Event()
        self._end = asyncio.Event()
        self._chunk: list[StepRecord] = []
        self._encoding: set[asyncio.Future[bytes]] = set()
        self.hub = EventHub("device check")

    def post(self, record: StepRecord) -> None:
        """Take a record from the engine's thread; one call on the loop takes all that came until then."""
        with self._lock:
            self._outbox.append(record)
            is_first, self._is_scheduled = not self._is_scheduled, True
        if is_first:
            self._loop.call_soon_threadsafe(self._drain)

    def start(self) -> None:
        """Return when all pages watch."""
        self._thread.start()
        self._is_ready.wait()

    def stop(self) -> None:
        """End the thread, once it has done what it had to do."""
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    # ---------------------------------------------------------------- in the thread

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self.hub.open(self._config, "device check")
        pages = [asyncio.create_task(self._watch()) for _ in range(self._num_pages)]
        self._loop.call_soon(self._is_ready.set)
        await self._end.wait()
        for page in pages:
            page.cancel()
        await asyncio.gather(*pages, return_exceptions=True)
        await asyncio.gather(*self._encoding)

    async def _watch(self) -> None:
        with self.hub.subscribe(Resume()) as subscription:
            await self._take_all(subscription)

    async def _take_all(self, subscription: Subscription) -> None:
        painted = 0
        while True:
            message = await subscription.next_message()
            painted += 1
            self.num_messages += 1
            self.num_bytes += len(message)
            subscription.on_message(make_ack(painted))

    def _drain(self) -> None:
        with self._lock:
            self._is_scheduled = False
            records, self._outbox = self._outbox, []
        self.hub.publish(records)
        encode_plain(records)
        self._chunk += records
        if len(self._chunk) >= _CHUNK_STEPS:
            encode = partial(encode_columns, self._chunk)
            self._chunk = []
            encoding = asyncio.ensure_future(self._loop.run_in_executor(None, encode))
            self._encoding.add(encoding)
            encoding.add_done_callback(self._encoding.discard)


def drop(_record: StepRecord) -> None:
    """Take a record and do nothing with it."""


@contextmanager
def watched(config: EngineConfig, num_pages: int | None) -> Iterator[Callable[[StepRecord], None]]:
    """Give what takes an engine's records: with so many pages, or nothing at all (None)."""
    if num_pages is None:
        yield drop
        return
    watchers = Watchers(config, num_pages)
    watchers.start()
    try:
        yield watchers.post
    finally:
        watchers.stop()
    if watchers.hub.has_failed:
        raise RuntimeError("the live view did not add up")
