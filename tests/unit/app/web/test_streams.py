"""The socket handler against a socket that can fail or be cancelled at any await."""

import asyncio
from typing import Any

import pytest
from litestar import WebSocket
from litestar.exceptions import WebSocketDisconnect

from app.realtime.hub import EventHub
from app.web import streams
from app.web.streams import engine_socket
from tests.builders import make_core, make_request
from tests.support.wire import make_ack


class FakeSocket:
    """Stands in for the server's side of a socket: `inbox` is what the client sends."""

    def __init__(self, query: dict[str, str] | None = None) -> None:
        self.inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.sent: list[bytes] = []
        self.closed: tuple[int, str] | None = None
        self.send_error: Exception | None = None
        self.num_send_errors = 0
        self.blocked = False
        self.acknowledges = False
        query_string = "&".join(f"{key}={value}" for key, value in (query or {}).items())
        scope: Any = {
            "type": "websocket",
            "query_string": query_string.encode(),
            "headers": [],
            "path": "/ws/engine",
        }
        self.socket: Any = WebSocket(scope, self._receive, self._send)
        self.inbox.put_nowait({"type": "websocket.connect"})

    async def _receive(self) -> Any:
        return await self.inbox.get()

    async def _send(self, event: Any) -> None:
        await asyncio.sleep(0)
        if self.blocked and event["type"] == "websocket.send":
            await asyncio.Event().wait()
        if self.send_error is not None and event["type"] != "websocket.accept":
            self.num_send_errors += 1
            raise self.send_error
        if event["type"] == "websocket.send":
            self.sent.append(event["bytes"])
            if self.acknowledges:
                self.client_sends(make_ack(len(self.sent)))
        elif event["type"] == "websocket.close":
            self.closed = (event["code"], event["reason"])

    def client_sends(self, data: bytes | str) -> None:
        key = "bytes" if isinstance(data, bytes) else "text"
        self.inbox.put_nowait({"type": "websocket.receive", key: data})

    def client_leaves(self) -> None:
        self.inbox.put_nowait({"type": "websocket.disconnect", "code": 1001})

    async def serve(self, hub: EventHub) -> None:
        await engine_socket.fn(self.socket, hub)


class BusyEngine:
    """A hub and an engine that never runs out of work."""

    def __init__(self, hub: EventHub) -> None:
        self.hub = hub
        self.core = make_core(num_blocks=64, max_model_len=64)
        self.num = 0
        hub.open(self.core.config, "fake")

    def step(self) -> None:
        if not self.core.has_work:
            self.num += 1
            self.core.add_request(make_request(f"r{self.num}", prompt=9, max_tokens=20))
        self.hub.publish([self.core.step().record])

    async def run(self) -> None:
        while True:
            self.step()
            await asyncio.sleep(0)


@pytest.fixture
def hub() -> EventHub:
    return EventHub("s1")


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def test_messages_flow_until_the_client_leaves(hub: EventHub) -> None:
    engine = BusyEngine(hub)
    client = FakeSocket()
    client.acknowledges = True
    serving = asyncio.create_task(client.serve(hub))
    traffic = asyncio.create_task(engine.run())
    await until(lambda: len(client.sent) >= 5)
    assert hub.num_clients == 1
    client.client_leaves()
    await asyncio.wait_for(serving, 5)
    traffic.cancel()
    assert client.closed is None
    assert hub.num_clients == 0


async def test_the_server_says_that_it_stops(hub: EventHub) -> None:
    client = FakeSocket()
    serving = asyncio.create_task(client.serve(hub))
    await until(lambda: client.sent)
    hub.close()
    await asyncio.wait_for(serving, 5)
    assert client.closed is not None
    assert client.closed[0] == 1012


@pytest.mark.parametrize(
    ("data", "code"),
    [("text", 1008), (b"", 1008), (b"\0" * 12, 1008), (make_ack(9), 1008), (b"\0" * 16_384, 1008)],
)
async def test_a_malformed_message_closes_the_socket(hub: EventHub, data: bytes | str, code: int) -> None:
    client = FakeSocket()
    serving = asyncio.create_task(client.serve(hub))
    await until(lambda: client.sent)
    client.client_sends(data)
    await asyncio.wait_for(serving, 5)
    assert client.closed is not None
    assert client.closed[0] == code
    assert hub.num_clients == 0


@pytest.mark.parametrize("step", ["-1", "x", "1.5", "", "4294967296", "0" * 11 + "9" * 20, "9" * 5000, "٣"])
async def test_a_bad_step_number_is_refused(hub: EventHub, step: str) -> None:
    client = FakeSocket({"from": step})
    if not step:
        client.socket.scope["query_string"] = b"from=%20"
    await asyncio.wait_for(client.serve(hub), 5)
    assert client.closed is not None
    assert client.closed[0] == 1008


async def test_one_client_too_many_is_told_to_come_back(
    hub: EventHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.realtime.hub.MAX_SUBSCRIPTIONS", 1)
    first, second = FakeSocket(), FakeSocket()
    serving = asyncio.create_task(first.serve(hub))
    await until(lambda: first.sent)
    await asyncio.wait_for(second.serve(hub), 5)
    assert second.closed is not None
    assert second.closed[0] == 1013
    assert hub.num_clients == 1
    first.client_leaves()
    await asyncio.wait_for(serving, 5)


async def test_a_client_that_takes_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = EventHub("s1", silence_s=0.05)
    client = FakeSocket()
    client.blocked = True
    await asyncio.wait_for(client.serve(hub), 5)
    assert client.closed is not None
    assert client.closed[0] == 1013
    assert hub.num_clients == 0


@pytest.mark.parametrize("painted", [0, 1])
async def test_a_client_that_takes_nothing_is_dropped_though_it_acknowledges(painted: int) -> None:
    hub = EventHub("s1", silence_s=0.05)
    client = FakeSocket()
    client.blocked = True

    async def acknowledge() -> None:
        await until(lambda: hub.num_clients == 1)
        while hub.num_clients == 1:
            client.client_sends(make_ack(painted))
            await asyncio.sleep(0.005)

    acknowledging = asyncio.create_task(acknowledge())
    async with asyncio.timeout(20):
        await client.serve(hub)
    assert client.closed == (1013, "nothing taken for 0.05 s")
    acknowledging.cancel()


async def test_a_client_that_acknowledges_nothing_is_dropped() -> None:
    hub = EventHub("s1", silence_s=0.05)
    client = FakeSocket()
    await asyncio.wait_for(client.serve(hub), 5)
    assert client.closed is not None
    assert client.closed[0] == 1013


@pytest.mark.parametrize(
    "error", [WebSocketDisconnect(detail="gone"), ConnectionResetError(), RuntimeError("after close")]
)
async def test_a_connection_that_breaks_while_sending_ends_quietly(
    hub: EventHub, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    client = FakeSocket()
    client.send_error = error
    serving = asyncio.create_task(client.serve(hub))
    await until(lambda: client.num_send_errors)
    await asyncio.sleep(0.01)
    assert not serving.done(), "the server has not said yet that the client is gone"
    client.client_leaves()
    await asyncio.wait_for(serving, 5)
    assert hub.num_clients == 0
    assert [record for record in caplog.records if record.levelname in {"WARNING", "ERROR"}] == []


async def test_a_fault_of_ours_is_logged_and_the_client_told_to_come_back(
    hub: EventHub, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(hub, "make_hello", lambda: fail(None))
    client = FakeSocket()
    await asyncio.wait_for(client.serve(hub), 5)
    assert client.closed is not None
    assert client.closed[0] == 1011
    assert "a bug" in caplog.text


async def test_quick_connects_leave_no_subscriber(hub: EventHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.realtime.hub.MAX_SUBSCRIPTIONS", 1000)
    engine = BusyEngine(hub)
    for _ in range(300):
        engine.step()
    traffic = asyncio.create_task(engine.run())
    serving = []
    for cycle in range(500):
        client = FakeSocket({"from": "1"} if cycle % 2 else None)
        serving.append(asyncio.create_task(client.serve(hub)))
        for _ in range(cycle % 7):
            await asyncio.sleep(0)
        client.client_leaves()
    await asyncio.wait_for(asyncio.gather(*serving), 60)
    traffic.cancel()
    assert hub.num_clients == 0


async def test_cancelling_at_any_await_leaves_no_subscriber(hub: EventHub) -> None:
    engine = BusyEngine(hub)
    for turns in range(40):
        client = FakeSocket()
        client.acknowledges = True
        serving = asyncio.create_task(client.serve(hub))
        for _ in range(turns):
            engine.step()
            await asyncio.sleep(0)
        serving.cancel()
        await asyncio.wait({serving}, timeout=5)
        assert serving.cancelled() or serving.done()
        assert hub.num_clients == 0


async def test_a_refused_client_that_takes_no_close_is_left_alone(
    hub: EventHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "FAREWELL_S", 0.05)
    client = FakeSocket({"from": "x"})

    async def never(event: Any) -> None:
        if event["type"] == "websocket.close":
            await asyncio.Event().wait()

    client.socket.send = never
    await asyncio.wait_for(client.serve(hub), 5)
