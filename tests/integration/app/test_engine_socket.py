"""The engine socket and the state document through the whole application, in process and on a real port."""

import asyncio
import contextlib
import json
import logging
import random
import socket
import struct
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import websockets
from litestar.exceptions import WebSocketDisconnect
from litestar.testing import AsyncTestClient
from websockets.asyncio.client import ClientConnection, connect

from tests.support.live_app import LiveApp, serve_in_thread
from tests.support.wire import Picture, make_ack, missing_rows, packed_cells


async def until(condition: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.01)
    except TimeoutError:
        pytest.fail(what)


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


async def read_to_end(connection: ClientConnection) -> tuple[int, str] | None:
    """Read, acknowledging nothing, until the server closes; return its code and reason."""
    try:
        async with asyncio.timeout(20):
            async for _ in connection:
                pass
    except websockets.ConnectionClosedError:
        pass
    close = connection.protocol.close_rcvd
    return (close.code, close.reason) if close else None


def open_socket(address: str, query: str = "") -> Any:
    return connect(f"ws://{address}/ws/engine{query}", compression=None, max_size=None)


async def watch(
    connection: ClientConnection, picture: Picture, num_messages: int, *, painted: int = 0
) -> None:
    for number in range(painted + 1, painted + num_messages + 1):
        message = await asyncio.wait_for(connection.recv(), 20)
        assert isinstance(message, bytes)
        picture.apply(message)
        await connection.send(make_ack(number))


async def test_picture_and_state_document_agree_in_process() -> None:
    live = LiveApp(step_s=None)
    live.step(100)
    async with AsyncTestClient(live.app) as client:
        state = (await client.get("/api/engine/state")).json()
        with await client.websocket_connect("/ws/engine") as connection:
            picture = Picture()
            picture.apply(connection.receive_bytes(timeout=10))
    assert picture.step == state["step"] == 100
    assert picture.cells == packed_cells(state["blocks"])
    assert picture.rows == list(range(1, 101))
    assert (state["status"], state["session"], state["model"], state["progress"]) == (
        "ready",
        "s1",
        "fake",
        None,
    )
    assert live.hub.num_clients == 0
    assert live.exceptions == []


async def test_state_without_blocks_and_while_loading() -> None:
    live = LiveApp(step_s=None)
    async with AsyncTestClient(live.app) as client:
        loading = await client.get("/api/engine/state")
        assert loading.status_code == 200
        assert (loading.json()["status"], loading.json()["blocks"]) == ("loading", [])
        live.step(10)
        short = await client.get("/api/engine/state?blocks=0")
        assert "blocks" not in short.json()
        assert short.json()["step"] == 10
        assert short.headers["content-type"] == "application/json"


async def test_a_text_message_is_refused_with_1008_in_process() -> None:
    live = LiveApp(step_s=None)
    async with AsyncTestClient(live.app) as client:
        with await client.websocket_connect("/ws/engine") as connection:
            connection.receive_bytes(timeout=10)
            connection.send_text("hello")
            with pytest.raises(WebSocketDisconnect) as closed:
                connection.receive_bytes(timeout=10)
    assert closed.value.code == 1008
    assert live.exceptions == []


async def test_live_picture_equals_the_state_document_after_a_dropped_socket_and_a_slow_spell(
    caplog: pytest.LogCaptureFixture,
) -> None:
    live = LiveApp(step_s=0.005)
    with serve_in_thread(live) as address:
        picture = Picture()
        async with open_socket(address) as connection:
            await watch(connection, picture, 20)
            connection.transport.abort()
        rows_before = len(picture.rows)
        async with open_socket(address, f"?from={picture.rows[-1]}&session=s1") as connection:
            await watch(connection, picture, 3)
            await until(lambda: live.num_steps > picture.step + 200, "the engine stands still")
            await watch(connection, picture, 5, painted=3)
        assert len(picture.rows) > rows_before
        assert missing_rows(picture.rows, picture.gaps) == []
        assert len(set(picture.rows)) == len(picture.rows), "no row came twice"
        await compare_at_the_same_step(address)
    assert errors_in(caplog) == []


async def compare_at_the_same_step(address: str) -> None:
    """Collect pictures by step until the document is of one of these steps."""
    pictures: dict[int, list[int]] = {}

    async def collect() -> None:
        picture = Picture()
        async with open_socket(address) as connection:
            for number in range(1, 10_000):
                message = await connection.recv()
                assert isinstance(message, bytes)
                picture.apply(message)
                pictures[picture.step] = list(picture.cells)
                await connection.send(make_ack(number))

    collecting = asyncio.create_task(collect())
    try:
        async with httpx.AsyncClient() as client, asyncio.timeout(60):
            documents: dict[int, Any] = {}
            while not (common := pictures.keys() & documents.keys()):
                document = (await client.get(f"http://{address}/api/engine/state")).json()
                documents[document["step"]] = document["blocks"]
    finally:
        collecting.cancel()
        await asyncio.gather(collecting, return_exceptions=True)
    for step in common:
        assert pictures[step] == packed_cells(documents[step])


async def test_tabs_that_close_under_traffic_leave_no_trace(caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(1)
    live = LiveApp(step_s=0.0005)
    caplog.set_level(logging.INFO)
    with serve_in_thread(live) as address:

        async def visit() -> None:
            connection = await open_socket(address)
            for number in range(1, rng.randrange(1, 6)):
                await asyncio.wait_for(connection.recv(), 20)
                await connection.send(make_ack(number))
            connection.transport.abort()
            with contextlib.suppress(websockets.ConnectionClosed):
                await connection.close()

        for _ in range(10):
            await asyncio.gather(*(visit() for _ in range(5)))
        await until(lambda: live.hub.num_clients == 0, "a subscriber is left")
    assert errors_in(caplog) == []
    assert live.exceptions == []


async def test_clients_that_reset_in_the_middle_of_the_handshake_leave_no_trace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    live = LiveApp()
    request = (
        "GET /ws/engine HTTP/1.1\r\nHost: {address}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    with serve_in_thread(live) as address:
        host, port = address.rsplit(":", 1)
        for _ in range(100):
            client = socket.create_connection((host, int(port)))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(request.format(address=address).encode())
            client.close()
        await until(lambda: live.hub.num_clients == 0, "a subscriber is left")
    assert errors_in(caplog) == []
    assert live.exceptions == []


async def test_a_client_that_acknowledges_nothing_is_dropped_and_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    live = LiveApp(silence_s=1.5)
    with serve_in_thread(live) as address:
        async with open_socket(address) as silent, open_socket(address) as healthy:
            watching = asyncio.create_task(watch(healthy, Picture(), 30))
            closed = await read_to_end(silent)
            await watching
    assert closed == (1013, "no answer for 1.5 s")
    assert errors_in(caplog) == []


@pytest.mark.parametrize(("size", "code"), [(5, 1008), (16 * 1024, 1008), (16 * 1024 + 1, 1009)])
async def test_a_message_that_is_no_ack_closes_the_socket(
    size: int, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    live = LiveApp()
    with serve_in_thread(live) as address:
        async with open_socket(address) as connection:
            await connection.send(bytes(size))
            closed = await read_to_end(connection)
        await until(lambda: live.hub.num_clients == 0, "a subscriber is left")
    assert closed is not None
    assert closed[0] == code
    assert errors_in(caplog) == []


async def test_a_server_that_stops_says_so(caplog: pytest.LogCaptureFixture) -> None:
    live = LiveApp()
    with serve_in_thread(live) as address:
        connection = await open_socket(address)
        await connection.recv()
    closed = await read_to_end(connection)
    assert closed is not None
    assert closed[0] == 1012
    assert errors_in(caplog) == []


async def test_the_65th_page_is_told_to_come_back() -> None:
    live = LiveApp(step_s=0.02)
    with serve_in_thread(live) as address:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(64):
                connection = await stack.enter_async_context(open_socket(address))
                await connection.recv()
            extra = await stack.enter_async_context(open_socket(address))
            with pytest.raises(websockets.ConnectionClosed) as closed:
                await asyncio.wait_for(extra.recv(), 20)
            assert closed.value.rcvd is not None
            assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (
                1013,
                "64 pages are watching already",
            )
            async with httpx.AsyncClient() as client:
                state = (await client.get(f"http://{address}/api/engine/state?blocks=0")).json()
    assert json.dumps(state["config"])
