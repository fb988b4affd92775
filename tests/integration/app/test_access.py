"""Who is let in, and the headers that every answer carries, over a real port."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
import websockets
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from tests.support.api import ServedApi, served_api
from tests.support.fake_engine import FakeEngine

EVIL = "http://evil.example"


@pytest.fixture
async def api() -> AsyncIterator[ServedApi]:
    async with served_api(FakeEngine()) as served:
        yield served


@pytest.mark.parametrize("path", ["/live", "/v1/models", "/health/live", "/api/engine/state", "/nothing"])
async def test_a_foreign_host_is_refused_everywhere(api: ServedApi, path: str) -> None:
    response = await api.client.get(path, headers={"host": "evil.example"})
    assert response.status_code == 421
    body = response.json()
    message = body["error"]["message"] if path.startswith("/v1") else body["detail"]
    assert "evil.example" in message
    assert "--allowed-host" in message


async def test_local_names_reach_the_server_through_a_tunnel(api: ServedApi) -> None:
    for host in ("localhost:9999", "127.0.0.1:9999", "LOCALHOST"):
        assert (await api.client.get("/health/live", headers={"host": host})).status_code == 200


async def test_a_request_without_host_is_refused(api: ServedApi) -> None:
    reader, writer = await asyncio.open_connection(*api.address)
    writer.write(b"GET /health/live HTTP/1.0\r\n\r\n")
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("origin", [EVIL, "null", "http://127.0.0.1:1"])
async def test_a_foreign_origin_may_not_post(api: ServedApi, origin: str) -> None:
    response = await api.client.post(
        "/v1/chat/completions", json=api.chat_body(max_tokens=1), headers={"origin": origin}
    )
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "origin_not_allowed"
    assert not api.engine.runner.num_steps


async def test_own_pages_and_programs_may_post(api: ServedApi) -> None:
    for headers in ({}, {"origin": api.url}):
        response = await api.client.post(
            "/v1/chat/completions", json=api.chat_body(max_tokens=1), headers=headers
        )
        assert response.status_code == 200


async def test_a_listed_host_is_let_in() -> None:
    async with served_api(FakeEngine(), allowed_host=("box.example",)) as api:
        headers = {"host": "box.example", "origin": "https://box.example"}
        response = await api.client.post(
            "/v1/chat/completions", json=api.chat_body(max_tokens=1), headers=headers
        )
        assert response.status_code == 200


@pytest.mark.parametrize("headers", [{"origin": EVIL}, {"origin": "null"}, {"host": "evil.example"}])
async def test_a_foreign_socket_is_refused_before_it_opens(api: ServedApi, headers: dict[str, str]) -> None:
    url = api.url.replace("http", "ws", 1) + "/ws/engine"
    if "host" in headers:
        host, port = api.address
        connection = connect("ws://evil.example/ws/engine", host=host, port=port)
    else:
        connection = connect(url, additional_headers=headers)
    with pytest.raises(InvalidStatus) as refused:
        await connection
    assert refused.value.response.status_code == 403
    assert api.plugin.hub.num_clients == 0


@pytest.mark.parametrize("origin", [None, "own"])
async def test_own_sockets_open(api: ServedApi, origin: str | None) -> None:
    url = api.url.replace("http", "ws", 1) + "/ws/engine"
    async with connect(url, origin=websockets.Origin(api.url) if origin else None) as socket:
        assert isinstance(await socket.recv(), bytes)


async def test_every_answer_carries_the_security_headers(api: ServedApi) -> None:
    page = await api.client.get("/live")
    responses = [
        page,
        await api.client.get("/nothing"),
        await api.client.get("/v1/models"),
        await api.client.post("/v1/models"),
        await api.client.get("/live", headers={"host": "evil.example"}),
        await api.client.post("/v1/chat/completions", json=api.chat_body(stream=True, max_tokens=1)),
    ]
    for response in responses:
        policy = response.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "same-origin"
        assert response.headers["cross-origin-opener-policy"] == "same-origin"
        assert "camera=()" in response.headers["permissions-policy"]
        assert "server" not in response.headers


async def test_every_answer_of_the_api_carries_a_request_id(api: ServedApi) -> None:
    async def send_all(label: dict[str, str]) -> list[httpx.Response]:
        client, path, body = api.client, "/v1/chat/completions", api.chat_body(max_tokens=1)
        return [
            await client.get("/v1/models", headers=label),
            await client.get("/v1/models/fake", headers=label),
            await client.get("/v1/nothing", headers=label),
            await client.get(path, headers=label),
            await client.post(path, json=body, headers=label),
            await client.post(path, json={**body, "stream": True}, headers=label),
            await client.post(path, content=b"{", headers=label),
            await client.post(path, content=b"x" * (5 * 2**20), headers=label),
            await client.get("/v1/models", headers={**label, "host": "evil.example"}),
            await client.post(path, json=body, headers={**label, "origin": EVIL}),
        ]

    for response in await send_all({"x-request-id": "my label"}):
        assert response.headers.get_list("x-request-id") == ["my label"]
    own = [response.headers["x-request-id"] for response in await send_all({})]
    assert len(set(own)) == len(own)
    assert all(label.startswith(("req-", "chatcmpl-")) for label in own)
    for response in await send_all({"x-request-id": "x" * 129}):
        assert response.headers["x-request-id"].startswith(("req-", "chatcmpl-"))


async def test_a_method_that_a_path_lacks_is_refused_with_those_that_it_has(api: ServedApi) -> None:
    response = await api.client.get("/v1/chat/completions")
    assert (response.status_code, response.json()["error"]["code"]) == (405, "method_not_allowed")
    assert "POST" in response.headers["allow"]


async def test_people_get_a_page_and_programs_a_body_when_something_is_missing(api: ServedApi) -> None:
    page = await api.client.get("/nothing", headers={"accept": "text/html,*/*"})
    assert (page.status_code, page.headers["content-type"]) == (404, "text/html; charset=utf-8")
    body = await api.client.get("/v1/nothing", headers={"accept": "text/html,*/*"})
    assert body.json()["error"]["code"] == "not_found"
