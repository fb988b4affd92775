"""What a connection may take, and what a request line may say, over a real port."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from websockets.asyncio.client import connect

import app.connections
from app.security import MAX_HEADER_BYTES
from app.web.templating import asset_url, assets_version
from tests.support.api import ServedApi, served_api, until
from tests.support.fake_engine import FakeEngine

POST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Length: 99\r\nContent-Type: application/json\r\n\r\n"
)


@pytest.fixture
async def api() -> AsyncIterator[ServedApi]:
    async with served_api(FakeEngine()) as served:
        yield served


async def send(api: ServedApi, request: bytes) -> bytes:
    """Send a request on a connection of its own; return everything until the server closes it."""
    reader, writer = await asyncio.open_connection(*api.address)
    try:
        writer.write(request)
        async with asyncio.timeout(10):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize("start", [b"", b"GET / HTTP/1.1\r\nHost: loc", POST, POST + b"{"])
async def test_a_request_that_does_not_come_is_not_waited_for(
    api: ServedApi, monkeypatch: pytest.MonkeyPatch, start: bytes
) -> None:
    monkeypatch.setattr(app.connections, "HEAD_TIMEOUT_S", 0.2)
    monkeypatch.setattr(app.connections, "BODY_TIMEOUT_S", 0.3)
    assert await send(api, start) == b""
    await until(lambda: not api.server.server_state.connections)


async def test_the_second_request_of_a_connection_is_not_waited_for_either(
    api: ServedApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app.connections, "HEAD_TIMEOUT_S", 0.5)
    whole = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert (await send(api, whole + whole + b"GET / HT")).count(b"HTTP/1.1 200") == 2


async def test_answers_and_sockets_may_last_longer_than_a_request_may(
    api: ServedApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app.connections, "HEAD_TIMEOUT_S", 0.1)
    monkeypatch.setattr(app.connections, "BODY_TIMEOUT_S", 0.1)
    api.engine.runner.gate.clear()
    async with connect(api.url.replace("http", "ws", 1) + "/ws/engine") as socket:
        answer = asyncio.create_task(
            api.client.post("/v1/chat/completions", json=api.chat_body(max_tokens=1))
        )
        await asyncio.sleep(0.4)  # several time-outs: nothing must happen in it
        api.engine.runner.gate.set()
        assert (await answer).status_code == 200
        assert await socket.recv()


async def test_connections_beyond_the_limit_are_closed_at_once(
    api: ServedApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app.connections, "MAX_CONNECTIONS", 3)
    taken = [await asyncio.open_connection(*api.address) for _ in range(3)]
    await until(lambda: len(api.server.server_state.connections) == 3)
    whole = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    for _ in range(5):
        assert await send(api, whole) == b""
    taken[0][1].close()
    await until(lambda: len(api.server.server_state.connections) == 2)
    assert (await send(api, whole)).startswith(b"HTTP/1.1 200")
    for _, writer in taken:
        writer.close()


async def test_long_addresses_and_many_headers_are_refused_in_one_packet_or_many(api: ServedApi) -> None:
    response = await api.client.get("/v1/models?" + "a" * 9000)
    assert (response.status_code, response.json()["error"]["code"]) == (414, "address_too_long")
    response = await api.client.get("/v1/models", headers={"x-long": "a" * (MAX_HEADER_BYTES + 1)})
    assert (response.status_code, response.json()["error"]["code"]) == (431, "headers_too_large")
    endless = await send(
        api, b"GET / HTTP/1.1\r\nHost: localhost\r\nx-long: " + b"a" * (4 * MAX_HEADER_BYTES)
    )
    assert endless == b"" or endless.startswith(b"HTTP/1.1 4")


@pytest.mark.parametrize(
    "path", ["/live", "/", "/v1/models", "/health/live", "/api/engine/state", "/nothing", "asset"]
)
async def test_head_answers_like_get_without_the_body(api: ServedApi, path: str) -> None:
    path = asset_url("css/app.css") if path == "asset" else path
    whole, head = await api.client.get(path), await api.client.head(path)
    assert head.status_code == whole.status_code
    assert head.content == b""
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert "content-length" in head.headers


async def test_head_is_named_where_get_works_and_refused_elsewhere(api: ServedApi) -> None:
    assert "HEAD" in (await api.client.post("/v1/models")).headers["allow"]
    head = await api.client.head("/v1/chat/completions")
    assert (head.status_code, "HEAD" in head.headers["allow"]) == (405, False)


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://127.0.0.1:1/health/live", "127.0.0.1:1", 200),
        ("HTTP://localhost/health/live?x=1", "evil.example", 200),
        ("http://evil.example/health/live", "localhost", 421),
        ("http://localhost@evil.example/health/live", "localhost", 421),
        ("http://localhost", "localhost", 302),
        ("ftp://localhost/health/live", "localhost", 404),
    ],
)
async def test_a_target_may_name_the_server(api: ServedApi, target: str, host: str, status: int) -> None:
    request = f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    assert (await send(api, request.encode())).startswith(f"HTTP/1.1 {status}".encode())


@pytest.mark.parametrize("host", [b"localhost#", b"local\thost", b"localhost/x", b"evil.example", b"[::1"])
async def test_every_wrong_host_gets_the_same_answer(api: ServedApi, host: bytes) -> None:
    answer = await send(api, b"GET /v1/models HTTP/1.1\r\nConnection: close\r\nHost: " + host + b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 421")
    assert b"host_not_allowed" in answer


@pytest.mark.parametrize(
    "name",
    ["%00", "a%00b", "a" * 5000, "%C3%A9" * 200, "css/app.css/x", "..%2f..%2fpyproject.toml", "%FF", "css"],
)
async def test_what_cannot_be_a_file_is_not_there(
    api: ServedApi, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    response = await api.client.get(f"/static/{assets_version()}/{name}")
    assert (response.status_code, response.json()["code"]) == (404, "not_found")
    assert not caplog.records
