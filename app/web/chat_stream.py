"""An answer as server-sent events: text as it comes, how far it is, and its end. Watching changes nothing.

`id` of an event is the number of characters up to its end, so that a page that comes back gets each
character once. Events: `text` {"text"}, `stats` (see `_describe`), `end` {"status"}.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec
from litestar import Response
from litestar.response.base import ASGIResponse
from litestar.types import Receive, Scope, Send

from app.errors import InterruptedAnswerError
from app.services.chat_answers import Answer
from app.services.chat_trace import Progress
from app.services.chat_types import Message
from app.web.live_context import REASON_WORDS
from app.web.openai_responses import PING_S, until_client_leaves
from engine.records import StopReason

TEXT_S: Final = 0.04
"""Text that comes within so long is sent together."""

STATS_S: Final = 0.25
HEARTBEAT: Final = b": still here\n\n"


class ChatStream(Response[bytes]):
    """Sends a message from character `start` on, until it has ended or the client leaves."""

    def __init__(self, message: Message, answer: Answer | None, start: int) -> None:
        """Nothing is sent before Litestar calls the response; `answer` is None once it has ended."""
        super().__init__(
            b"",
            media_type="text/event-stream",
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
        )
        self._events = _make_events(message, answer, start)

    def to_asgi_response(self, *_: Any, **__: Any) -> ASGIResponse:
        """Return the part that speaks ASGI."""
        return _ASGIChatStream(self._events, self.headers)


class _ASGIChatStream(ASGIResponse):
    _should_set_content_length = False

    def __init__(self, events: AsyncIterator[bytes], headers: dict[str, str]) -> None:
        super().__init__(headers=headers, media_type="text/event-stream", status_code=200)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        try:
            async with until_client_leaves(receive):
                await self.start_response(send)
                async for body in self._events:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except InterruptedAnswerError:
            return  # the client has left; the answer goes on


async def _make_events(message: Message, answer: Answer | None, start: int) -> AsyncIterator[bytes]:
    offset = start
    told: Progress | None = None
    sent_at = told_at = time.monotonic()
    while True:
        changed = None if answer is None else answer.changed
        now = time.monotonic()
        body = b""
        if answer is not None and message.is_streaming:
            progress = answer.progress
            is_due = told is None or progress.phase != told.phase or now - told_at >= STATS_S
            if is_due and progress != told:
                told, told_at = progress, now
                body += _event("stats", _describe(progress))
        if len(message.text) > offset:
            text, offset = message.text[offset:], len(message.text)
            body += _event("text", {"text": text}, offset)
        if not message.is_streaming or changed is None:
            yield body + _event("end", {"status": message.status.value}, len(message.text))
            return
        if not body and now - sent_at >= PING_S:
            body = HEARTBEAT
        if body:
            sent_at = now
            yield body
            await asyncio.sleep(TEXT_S)
        await _wait(changed)


async def _wait(changed: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(STATS_S):
            await changed.wait()
    except TimeoutError:
        return


def _describe(progress: Progress) -> dict[str, Any]:
    """Return phase, tokens, tok/s and where it runs; `waits_for` in words."""
    facts = msgspec.to_builtins(progress)
    waits_for = progress.waits_for
    facts["waits_for"] = REASON_WORDS[StopReason[waits_for.upper()]] if waits_for else None
    return facts  # type: ignore[no-any-return] # a struct becomes a dict


def _event(name: str, payload: dict[str, Any], event_id: int | None = None) -> bytes:
    head = f"event: {name}\n" if event_id is None else f"id: {event_id}\nevent: {name}\n"
    return head.encode() + b"data: " + msgspec.json.encode(payload) + b"\n\n"
