"""`WS /ws/engine`: binary step frames out, acknowledgements in (docs/wire.md)."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

import anyio
from anyio.abc import TaskGroup
from litestar import WebSocket, websocket
from litestar.di import NamedDependency
from litestar.exceptions import WebSocketDisconnect

from app.realtime.hub import EventHub, Resume, Subscription, SubscriptionEndedError

logger = logging.getLogger(__name__)

_GONE = (WebSocketDisconnect, OSError, RuntimeError)
"""What sending to a socket that is going away raises: Litestar when the disconnect was received, uvicorn
`ClientDisconnected` (an OSError) when the connection is lost, RuntimeError when it is closing."""

FAREWELL_S = 5.0
"""How long to wait for a client that is leaving: for its disconnect, or for a close frame to be taken."""

_MAX_STEP = 2**32 - 1
_MAX_STEP_DIGITS = 10

Socket = WebSocket[Any, Any, Any]


@websocket("/ws/engine")
async def engine_socket(socket: Socket, hub: NamedDependency[EventHub]) -> None:
    """Show the engine live. `?from=N&session=S`: the page has the step rows of session S up to N."""
    try:
        await socket.accept()
    except _GONE:
        return
    try:
        with hub.subscribe(_parse_resume(socket)) as subscription:
            ending = await _converse(socket, subscription)
    except SubscriptionEndedError as refusal:
        ending = refusal
    except Exception:
        logger.exception("The engine socket failed")
        ending = SubscriptionEndedError(1011, "internal error")
    if ending is not None:
        await _close(socket, ending)


def _parse_resume(socket: Socket) -> Resume:
    after, session = socket.query_params.get("from"), socket.query_params.get("session")
    if after is None:
        return Resume()
    # The length comes first: int() has an error of its own for thousands of digits.
    is_number = len(after) <= _MAX_STEP_DIGITS and after.isascii() and after.isdigit()
    if not (is_number and int(after) <= _MAX_STEP):
        raise SubscriptionEndedError(1008, "from is not a step number")
    return Resume(int(after), session)


class _Conversation:
    """Loops of which the first to end ends the others."""

    def __init__(self, tasks: TaskGroup) -> None:
        self._tasks = tasks
        self.ending: SubscriptionEndedError | None = None

    async def run(self, loop: Coroutine[Any, Any, None]) -> None:
        try:
            await loop
        except SubscriptionEndedError as ending:
            self.ending = self.ending or ending
        finally:
            self._tasks.cancel_scope.cancel()


async def _converse(socket: Socket, subscription: Subscription) -> SubscriptionEndedError | None:
    """Serve until either side ends it; return why the socket is to be closed, None if the client left."""
    async with anyio.create_task_group() as tasks:
        conversation = _Conversation(tasks)
        tasks.start_soon(conversation.run, _receive(socket, subscription))
        tasks.start_soon(conversation.run, _send(socket, subscription))
        tasks.start_soon(conversation.run, _watch_silence(subscription))
    return conversation.ending


async def _receive(socket: Socket, subscription: Subscription) -> None:
    while True:
        try:
            event = await socket.receive()
        except _GONE:
            return
        if event["type"] != "websocket.receive":
            return
        subscription.on_message(event.get("bytes"))


async def _watch_silence(subscription: Subscription) -> None:
    """Wait until the client has been silent for too long, whether it takes messages or not."""
    while True:  # noqa: ASYNC110 - silence is no event
        await asyncio.sleep(subscription.check_silence())


async def _send(socket: Socket, subscription: Subscription) -> None:
    while True:
        message = await subscription.next_message()
        try:
            await socket.send_bytes(message)
        except _GONE:
            # Its disconnect event is on the way and ends the conversation; returning before it has come
            # would make the server think that the handshake was never finished.
            await asyncio.sleep(FAREWELL_S)
            return


async def _close(socket: Socket, ending: SubscriptionEndedError) -> None:
    """Close with code and reason, if the client is still there to take it."""
    try:
        async with asyncio.timeout(FAREWELL_S):
            await socket.close(ending.code, ending.reason)
    except (TimeoutError, *_GONE):
        logger.debug("A socket was gone before it could be closed: %s", ending)
