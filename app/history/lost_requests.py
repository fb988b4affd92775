"""Requests whose newest row did not get into the file, for as long as there was no room for it."""

import asyncio
from collections.abc import Callable
from itertools import islice
from typing import Any, Final

from app.history.request_state import OpenRequest

MAX_LOST: Final = 16_384
"""So many requests are remembered, the newest; others get their end when the session does."""

RETRY_S: Final = 1.0
PIECE: Final = 256
"""Rows that are put at once; where there is room for few, some get there."""

PutAgain = Callable[[list[OpenRequest], dict[str, dict[str, Any]]], bool]
"""Gets requests, and values of requests that are known by id alone; False if there is no room for them."""


class LostRequests:
    """Has rows put again, as they are then, until they are taken. Lives on the event loop."""

    def __init__(self, put_again: PutAgain) -> None:
        """Nothing is lost yet."""
        self._put_again = put_again
        self._requests: dict[str, OpenRequest] = {}
        self._values: dict[str, dict[str, Any]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def get(self, request_id: str) -> OpenRequest | None:
        """Return a request that is to be put again."""
        return self._requests.get(request_id)

    def add(self, requests: list[OpenRequest]) -> None:
        """The rows of these were lost."""
        for request in requests:
            self._requests[request.request_id] = request
        _forget_oldest(self._requests)
        self._retry_later()

    def add_values(self, request_id: str, values: dict[str, Any]) -> None:
        """New values of a request that has ended were lost."""
        self._values[request_id] = values
        _forget_oldest(self._values)
        self._retry_later()

    def close(self) -> None:
        """Try once more; nothing is tried later."""
        self._is_closed = True
        self._retry()

    def _retry_later(self) -> None:
        if self._timer is None and not self._is_closed:
            self._timer = asyncio.get_running_loop().call_later(RETRY_S, self._retry)

    def _retry(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._requests or self._values:
            requests = list(islice(self._requests.values(), PIECE))
            values = dict(islice(self._values.items(), PIECE))
            if not self._put_again(requests, values):
                self._retry_later()
                return
            for request in requests:
                del self._requests[request.request_id]
            for request_id in values:
                del self._values[request_id]


def _forget_oldest(rows: dict[str, Any]) -> None:
    while len(rows) > MAX_LOST:
        del rows[next(iter(rows))]
