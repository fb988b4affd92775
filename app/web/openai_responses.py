"""Answers of the OpenAI API: whole ones and streams of server-sent events."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from litestar import Request, Response
from litestar.response.base import ASGIResponse
from litestar.types import Receive, Scope, Send

from app.errors import InterruptedAnswerError, describe_error, openai_error
from app.request_labels import REQUEST_ID_HEADER
from app.services.generation import CLIENT_GONE, ChoiceDelta, Generation, Usage

logger = logging.getLogger(__name__)

PING_S = 15.0
"""A stream that has nothing to say for so long sends a comment, so that no proxy cuts it."""

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class AnswerFormat:
    """How one kind of completion is written."""

    model: str
    created: int
    is_chat: bool
    include_usage: bool = False

    def make_completion(self, request_id: str, texts: list[str], reasons: list[str], usage: Usage) -> bytes:
        """Return the body of a whole answer."""
        choices = [
            self._whole_choice(index, text, reason)
            for index, (text, reason) in enumerate(zip(texts, reasons, strict=True))
        ]
        kind = "chat.completion" if self.is_chat else "text_completion"
        return msgspec.json.encode({**self._head(request_id, kind, choices), "usage": _usage(usage)})

    def make_opening(self, request_id: str, num_choices: int) -> bytes:
        """Return the events that begin a stream: in a chat, who speaks."""
        if not self.is_chat:
            return b""
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(request_id, _chat_choice(index, delta)) for index in range(num_choices))

    def make_events(self, request_id: str, deltas: Iterable[ChoiceDelta]) -> bytes:
        """Return the events that carry new text."""
        events = []
        for delta in deltas:
            if not self.is_chat:
                events.append(
                    self._chunk(request_id, _text_choice(delta.index, delta.text, delta.finish_reason))
                )
                continue
            if delta.text:
                events.append(self._chunk(request_id, _chat_choice(delta.index, {"content": delta.text})))
            if delta.finish_reason is not None:
                events.append(self._chunk(request_id, _chat_choice(delta.index, {}, delta.finish_reason)))
        return b"".join(events)

    def make_ending(self, request_id: str, usage: Usage) -> bytes:
        """Return the events that end a complete stream."""
        if not self.include_usage:
            return DONE
        return _event({**self._head(request_id, self._chunk_kind, []), "usage": _usage(usage)}) + DONE

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _head(self, request_id: str, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
            "choices": choices,
        }

    def _chunk(self, request_id: str, choice: dict[str, Any]) -> bytes:
        payload = self._head(request_id, self._chunk_kind, [choice])
        if self.include_usage:
            payload["usage"] = None
        return _event(payload)

    def _whole_choice(self, index: int, text: str, reason: str) -> dict[str, Any]:
        if not self.is_chat:
            return _text_choice(index, text, reason)
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": reason}


def make_format(model: str, *, is_chat: bool, include_usage: bool) -> AnswerFormat:
    """Return the format of an answer that begins now."""
    return AnswerFormat(model, int(time.time()), is_chat, include_usage)


async def make_whole_answer(
    request: Request[Any, Any, Any], generation: Generation, answer: AnswerFormat, label: str | None
) -> Response[bytes]:
    """Wait for all choices and return the whole answer; ends the generation when the client leaves.

    `label` is the caller's own name for the request.
    """
    texts = [""] * generation.num_choices
    reasons = [""] * generation.num_choices
    watcher = asyncio.create_task(_close_when_client_leaves(request.receive, generation))
    try:
        while deltas := await generation.next_deltas():
            for delta in deltas:
                texts[delta.index] += delta.text
                reasons[delta.index] = delta.finish_reason or ""
        body = answer.make_completion(generation.request_id, texts, reasons, generation.make_usage())
    finally:
        watcher.cancel()
        generation.close()
    return Response(
        body, media_type="application/json", headers={REQUEST_ID_HEADER: label or generation.request_id}
    )


class EventStream(Response[bytes]):
    """A streamed answer. It owns the generation and closes it, however the connection ends.

    `label` is the caller's own name for the request.
    """

    def __init__(self, generation: Generation, answer: AnswerFormat, label: str | None) -> None:
        """Nothing is sent before Litestar calls the response."""
        super().__init__(
            b"",
            media_type="text/event-stream",
            headers={
                REQUEST_ID_HEADER: label or generation.request_id,
                "cache-control": "no-cache",
                "x-accel-buffering": "no",
            },
        )
        self._generation = generation
        self._answer = answer

    def to_asgi_response(self, *_: Any, **__: Any) -> ASGIResponse:
        """Return the part that speaks ASGI."""
        return _ASGIEventStream(self._generation, self._answer, self.headers)


class _ASGIEventStream(ASGIResponse):
    _should_set_content_length = False

    def __init__(self, generation: Generation, answer: AnswerFormat, headers: dict[str, str]) -> None:
        super().__init__(headers=headers, media_type="text/event-stream", status_code=200)
        self._generation = generation
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        watcher = asyncio.create_task(_close_when_client_leaves(receive, self._generation))
        try:
            await self.start_response(send)
            await self._send_events(send)
        finally:
            # Closing does not wait for anything, so it works in a cancelled task as well.
            watcher.cancel()
            self._generation.close()

    async def _send_events(self, send: Send) -> None:
        generation, answer = self._generation, self._answer
        await _send(send, answer.make_opening(generation.request_id, generation.num_choices))
        try:
            while True:
                try:
                    async with asyncio.timeout(PING_S):
                        deltas = await generation.next_deltas()
                except TimeoutError:
                    await _send(send, PING)
                    continue
                if not deltas:
                    break
                await _send(send, answer.make_events(generation.request_id, deltas))
            ending = answer.make_ending(generation.request_id, generation.make_usage())
        except InterruptedAnswerError as error:
            if error.code == CLIENT_GONE:
                return
            ending = _event(openai_error(describe_error(error)))
        except Exception as error:  # the headers are sent: the stream itself has to say it
            logger.exception("The stream of %s failed", generation.request_id)
            ending = _event(openai_error(describe_error(error)))
        await send({"type": "http.response.body", "body": ending, "more_body": False})


@asynccontextmanager
async def until_client_leaves(receive: Receive) -> AsyncIterator[None]:
    """Around work for a request whose body is read: ends it when the client leaves.

    Raises `InterruptedAnswerError` then, which nobody reads.
    """
    watcher = asyncio.create_task(_wait_for_leave(receive))
    try:
        async with asyncio.timeout(None) as scope:

            def end(_: asyncio.Task[None]) -> None:
                scope.reschedule(asyncio.get_running_loop().time())

            watcher.add_done_callback(end)
            try:
                yield
            finally:
                watcher.remove_done_callback(end)
    except TimeoutError:
        if scope.expired():
            raise InterruptedAnswerError("The client has left.", code=CLIENT_GONE) from None
        raise
    finally:
        watcher.cancel()


async def _close_when_client_leaves(receive: Receive, generation: Generation) -> None:
    await _wait_for_leave(receive)
    generation.close()


async def _wait_for_leave(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(send: Send, body: bytes) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})


def _event(payload: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


def _chat_choice(index: int, delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _text_choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
