"""What one connection may take: uvicorn's HTTP protocol with time-outs, and with a limit on their number.

uvicorn closes a connection that idles between two requests, but waits for ever for the first one and for
the rest of one that has begun.
"""

import asyncio
import logging
import resource
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger(__name__)

HEAD_TIMEOUT_S = 10.0
"""How long a client may take for a request line and headers."""

BODY_TIMEOUT_S = 60.0
"""How long a client may take for a body (at most 4 MiB)."""

MAX_CONNECTIONS = 4096
MAX_OPEN_FILES = 8192


def raise_open_files_limit() -> None:
    """Allow as many sockets as requests may be open; the usual soft limit of 1,024 is too few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connection_limit() -> int:
    """Return how many connections may be open: at most half of what the process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(1, min(MAX_CONNECTIONS, soft // 2))


class BoundedProtocol(H11Protocol):
    """Closes connections beyond the limit at once, and those that do not deliver a request in time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what uvicorn passes."""
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None
        self._awaited: object = None
        self._is_upgraded = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # uvicorn's
        """Wait for the first request, or refuse."""
        super().connection_made(transport)
        if len(self.connections) > connection_limit():
            logger.debug("a connection was refused: %d are open", len(self.connections) - 1)
            # Not counted while it goes, or a burst of refused ones would keep others out.
            self.connections.discard(self)
            transport.abort()
        else:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._stop_watching()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._watch()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Leave the connection to the WebSocket, which has its own pings and time-outs."""
        self._is_upgraded = True
        self._stop_watching()
        super().handle_websocket_upgrade(event)

    def _watch(self) -> None:
        """Start, keep or stop the deadline, by the part of a request that is missing."""
        missing = self.conn.their_state
        if self._is_upgraded or missing not in (h11.IDLE, h11.SEND_BODY) or self.transport.is_closing():
            self._stop_watching()
        elif missing is not self._awaited:
            self._stop_watching()
            self._awaited = missing
            timeout_s = HEAD_TIMEOUT_S if missing is h11.IDLE else BODY_TIMEOUT_S
            self._deadline = self.loop.call_later(timeout_s, self._give_up)

    def _stop_watching(self) -> None:
        self._awaited = None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        logger.debug("a connection was closed: it did not deliver a request in time")
        self.transport.abort()
