"""The application over a fake engine, in one process."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
from httpx import Response
from litestar import Litestar
from litestar.testing import AsyncTestClient

from app.asgi import create_app
from app.commands.preparation import bind_sockets, show_url
from app.commands.server import Server, make_server
from app.plugins import ApplicationPlugin
from app.settings import Settings
from tests.support.fake_engine import FakeEngine

MODEL = "fake"
BASE_URL = "http://127.0.0.1:8000"
POLL_TIMEOUT_S = 10.0


@dataclass
class Api:
    """A client, and what stands behind the server."""

    client: AsyncTestClient[Litestar]
    engine: FakeEngine
    plugin: ApplicationPlugin

    async def chat(self, content: str = "hello", /, **fields: Any) -> Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 8, **fields}
        return await self.client.post("/v1/chat/completions", json=body)

    async def complete(self, prompt: Any = "hello", /, **fields: Any) -> Response:
        return await self.client.post(
            "/v1/completions", json={"model": MODEL, "prompt": prompt, "max_tokens": 8, **fields}
        )


@asynccontextmanager
async def running_api(
    engine: FakeEngine | None = None, *, wait_ready: bool = True, **settings: Any
) -> AsyncIterator[Api]:
    """Start the application; by default wait until the engine is there."""
    engine = engine or FakeEngine()
    app = create_app(Settings(served_model_name=MODEL, **settings), engine.load)
    plugin = app.plugins.get(ApplicationPlugin)
    async with AsyncTestClient(app=app, base_url=BASE_URL) as client:
        if wait_ready:
            await until(lambda: plugin.host.config is not None)
        yield Api(client, engine, plugin)


@dataclass
class ServedApi:
    """A real server in this process, on a real port."""

    client: httpx.AsyncClient
    engine: FakeEngine
    plugin: ApplicationPlugin
    server: Server
    url: str

    @property
    def address(self) -> tuple[str, int]:
        parsed = urlsplit(self.url)
        return parsed.hostname or "", parsed.port or 0

    def chat_body(self, content: str = "hello", /, **fields: Any) -> dict[str, Any]:
        return {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}


async def begin_streams(api: ServedApi, count: int, **fields: Any) -> list[asyncio.Task[str]]:
    """Ask for streamed chats that do not end by themselves; returns their texts to come once all have begun.

    Only then is every one of them told of a failure inside its stream: who is not admitted yet gets a plain
    error. What the scheduler holds does not say so, as it may wait for one that has not even arrived.
    """
    body = api.chat_body(**{"stream": True, "max_tokens": 3000, "ignore_eos": True, **fields})
    statuses: asyncio.Queue[int] = asyncio.Queue()

    async def read() -> str:
        async with (
            httpx.AsyncClient(base_url=api.url, timeout=2 * POLL_TIMEOUT_S) as client,
            client.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            statuses.put_nowait(response.status_code)
            return (await response.aread()).decode()

    streams = [asyncio.create_task(read()) for _ in range(count)]
    async with asyncio.timeout(POLL_TIMEOUT_S):
        assert [await statuses.get() for _ in streams] == [200] * count
    return streams


@asynccontextmanager
async def served_api(engine: FakeEngine, *, port: int = 0, **settings: Any) -> AsyncIterator[ServedApi]:
    """Serve the application on a port (0: a free one); leaving stops it as a signal would."""
    asked = Settings(served_model_name=MODEL, **settings)
    app = create_app(asked, engine.load)
    with bind_sockets("127.0.0.1", port) as sockets:
        url = show_url("127.0.0.1", sockets[0].getsockname()[1])
        server = make_server(app, asked, url)
        task = asyncio.create_task(server.serve(sockets))
        plugin = app.plugins.get(ApplicationPlugin)
        try:
            await until(lambda: server.started or task.done())
            async with httpx.AsyncClient(base_url=url, timeout=POLL_TIMEOUT_S) as client:
                await until(lambda: plugin.host.config is not None or not engine.load_gate.is_set())
                yield ServedApi(client, engine, plugin, server, url)
        finally:
            engine.runner.gate.set()
            engine.load_gate.set()
            server.should_exit = True
            await task


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds; fails after ten seconds."""
    async with asyncio.timeout(POLL_TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.005)


def read_events(text: str) -> list[Any]:
    """Return the data of server-sent events, decoded; `[DONE]` as it is."""
    events = []
    for block in text.split("\n\n"):
        data = block.removeprefix("data: ")
        if block and not block.startswith(":"):
            assert block.startswith("data: "), block
            events.append(data if data == "[DONE]" else json.loads(data))
    return events
