"""The tokens of one request on their way from the engine to whoever answers the client."""

import asyncio
from collections import deque
from dataclasses import dataclass

from engine.records import TokenOutput
from engine.sequence import FinishReason


@dataclass(frozen=True)
class StreamFailure:
    """Why a request ended without a full answer; `code` is a stable word for programs."""

    code: str
    message: str


_FAILURES: dict[str | None, StreamFailure] = {
    FinishReason.ABORT: StreamFailure("request_aborted", "The request was aborted."),
    FinishReason.ERROR: StreamFailure(
        "model_error", "The model gave no usable token for this request; the log says more."
    ),
}
"""Why there is no full answer, unless something better is known."""


class RequestStream:
    """Everything the engine gives for one request, all choices in one stream, in order.

    Lives on the event loop. Each choice ends with exactly one item that has a `finish_reason`; after
    the last of them, or after `fail`, the stream is closed. A reader that does not keep up costs at
    most one item per token that its request may generate, so `max_tokens` bounds the memory.
    """

    def __init__(self, request_id: str, num_choices: int) -> None:
        """Start open and empty."""
        self.request_id = request_id
        self.failure: StreamFailure | None = None
        self._num_open_choices = num_choices
        self._items: deque[TokenOutput] = deque()
        self._changed = asyncio.Event()

    @property
    def is_closed(self) -> bool:
        """Whether nothing more will be added."""
        return self._num_open_choices == 0

    def put(self, output: TokenOutput) -> None:
        """Add what one step gave for one choice."""
        if self.is_closed:
            return
        if output.finish_reason is not None:
            self._num_open_choices -= 1
            if output.finish_reason in _FAILURES and self.failure is None:
                self.failure = _FAILURES[output.finish_reason]
        self._items.append(output)
        self._changed.set()

    def fail(self, failure: StreamFailure) -> None:
        """Close the stream for all choices that are still open."""
        if not self.is_closed:
            self.failure = failure
            self._num_open_choices = 0
            self._changed.set()

    async def take(self) -> list[TokenOutput]:
        """Return all items that have come, waiting for the first; empty once closed and read."""
        while not self._items and not self.is_closed:
            self._changed.clear()
            await self._changed.wait()
        items = list(self._items)
        self._items.clear()
        return items
