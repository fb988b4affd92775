"""A small application with a real hub and a fake engine under constant traffic."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import uvicorn
from litestar import Litestar
from litestar.di import Provide
from litestar.types import Scope

from app.engine_host import EngineHost
from app.realtime.hub import EventHub
from app.web.engine_api import EngineApiController
from app.web.streams import engine_socket
from tests.builders import random_run


class LiveApp:
    """`app` serves the engine socket and the state; `start` and `step` drive the engine."""

    def __init__(
        self, *, seed: int = 1, step_s: float | None = 0.001, silence_s: float = 60.0, **overrides: Any
    ) -> None:
        """`step_s`: seconds between two steps once the server runs; None: only `step` moves it."""
        self.hub = EventHub("s1", silence_s=silence_s)
        self.exceptions: list[Exception] = []
        self.num_steps = 0
        self._step_s = step_s
        self._run = random_run(seed, 1_000_000, **overrides)
        host = EngineHost.__new__(EngineHost)
        host.__dict__.update(vars(SimpleNamespace(model_name="fake", progress=None, status="ready")))
        self.app = Litestar(
            route_handlers=[engine_socket, EngineApiController],
            dependencies={
                "hub": Provide(lambda: self.hub, sync_to_thread=False),
                "host": Provide(lambda: host, sync_to_thread=False),
            },
            lifespan=[self._lifespan],
            after_exception=[self._on_exception],
            logging_config=None,
            openapi_config=None,
        )

    def step(self, count: int = 1) -> None:
        """Run the engine and publish what it did."""
        for _ in range(count):
            core, result = next(self._run)
            if self.hub.snapshot is None:
                self.hub.open(core.config, "fake")
            self.hub.publish([result.record])
            self.num_steps += 1

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Litestar) -> AsyncIterator[None]:
        traffic = asyncio.create_task(self._traffic()) if self._step_s is not None else None
        try:
            yield
        finally:
            if traffic is not None:
                traffic.cancel()
            self.hub.close()

    async def _traffic(self) -> None:
        while True:
            self.step()
            await asyncio.sleep(self._step_s or 0)

    async def _on_exception(self, exception: Exception, _: Scope) -> None:
        self.exceptions.append(exception)


@contextlib.contextmanager
def serve_in_thread(live: LiveApp, **settings: Any) -> Iterator[str]:
    """Serve on a free port from another thread; yield `host:port`."""
    config = uvicorn.Config(
        live.app,
        port=0,
        ws="websockets-sansio",
        ws_max_size=16 * 1024,
        ws_per_message_deflate=False,
        log_config=None,
        timeout_graceful_shutdown=5,
        **settings,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="test-server")
    thread.start()
    try:
        started = threading.Event()
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            started.wait(0.01)
        host, port = server.servers[0].sockets[0].getsockname()[:2]
        yield f"{host}:{port}"
    finally:
        server.should_exit = True
        thread.join(20)
        logging.getLogger(__name__).debug("server thread alive: %s", thread.is_alive())
        assert not thread.is_alive(), "the server did not stop"
