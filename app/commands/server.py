"""The server process: uvicorn around the application, and how it ends."""

import asyncio
import gc
import os
import signal
import socket
import sys
from types import FrameType
from typing import NoReturn

import click
import uvicorn
from litestar import Litestar

from app.asgi import create_app
from app.connections import BoundedProtocol, raise_open_files_limit
from app.engine_host import HostStatus
from app.plugins import ApplicationPlugin
from app.realtime.hub import MAX_INBOUND_BYTES
from app.security import MAX_HEADER_BYTES
from app.settings import Settings
from engine.errors import ModelError
from engine.parallel.running import kill_ranks
from engine.runner.copying_thread import end_copying

CLOSE_TIMEOUT_S = 5
"""How long connections may take to close once everything on them has ended."""

EXIT_INTERRUPTED = 130


class Server(uvicorn.Server):
    """Ends open streams with a word before uvicorn starts to wait for their connections."""

    def __init__(
        self, config: uvicorn.Config, plugin: ApplicationPlugin, settings: Settings, url: str
    ) -> None:
        """Serve the application of `plugin`, reachable under `url`."""
        super().__init__(config)
        self._host = plugin.host
        self._hub = plugin.hub
        self._settings = settings
        self._url = url
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_been_ready = False
        self._host.add_status_listener(self._on_status)

    @property
    def load_error(self) -> str | None:
        """Why the model could not be loaded; None if it could, or has not been yet."""
        return None if self._has_been_ready else self._host.error

    @property
    def is_stuck(self) -> bool:
        """Whether the engine thread did not end although the server has."""
        return self._host.has_thread

    @property
    def activity(self) -> str:
        """What the engine thread does when it does not end."""
        return self._host.activity

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal, as the only thing that this process is there for."""
        gc.disable()  # until the model is loaded: hardly anything of all this is garbage
        self._host.add_status_listener(self._spare_the_collector)
        super().run(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say where."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        _say(f"Pageglass is listening on {self._url} and loads {self._settings.model_name} ...")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let open requests end, end the others with an error that says so, then close."""
        if self._host.num_open:
            num_open = self._host.num_open
            requests = "1 open request has" if num_open == 1 else f"{num_open} open requests have"
            _say(f"Stopping: {requests} {self._settings.shutdown_timeout:g} s to end.")
        await self._host.drain(self._settings.shutdown_timeout)
        self._hub.close()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's
        """Stop; a second Ctrl-C ends the process on the spot.

        Unlike uvicorn's, this does not raise the signal again in the end: a server that was asked to stop
        and did is a success.
        """
        if self.should_exit and sig == signal.SIGINT:
            _end_at_once(EXIT_INTERRUPTED)
        self.should_exit = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._host.begin_drain)

    def _spare_the_collector(self) -> None:
        """Never again let Python's garbage collector look through what is there once the model is loaded.

        A full collection stops every thread, the engine's and the event loop's too, for half a microsecond
        an object: with the 200,000 of modules and tokenizer that was a tenth of a second, now and then.
        """
        if self._host.status is HostStatus.READY and not gc.isenabled():
            gc.collect()
            gc.freeze()
            gc.enable()

    def _on_status(self) -> None:
        if self._host.status is HostStatus.READY and not self._has_been_ready:
            self._has_been_ready = True
            _say(f"Ready after {self._host.load_seconds or 0:.1f} s: open {self._url} to watch.")
        elif self._host.status is HostStatus.FAILED and not self._has_been_ready:
            self.should_exit = True


def make_server(application: Litestar, settings: Settings, url: str) -> Server:
    """Return the server of an application, reachable under `url`."""
    config = uvicorn.Config(
        application,
        http=BoundedProtocol,
        ws="websockets-sansio",
        ws_max_size=MAX_INBOUND_BYTES,
        ws_per_message_deflate=False,
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        # A little more than the guard allows, so that it is the guard that answers if it can.
        h11_max_incomplete_event_size=2 * MAX_HEADER_BYTES,
        timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
    )
    return Server(config, application.plugins.get(ApplicationPlugin), settings, url)


def run_server(settings: Settings, sockets: list[socket.socket], url: str) -> None:
    """Serve until a signal; raises `ModelError` if the model cannot be loaded."""
    raise_open_files_limit()
    server = make_server(create_app(settings), settings, url)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored: started to outlive its terminal
        signal.signal(signal.SIGHUP, server.handle_exit)
    server.run(sockets)
    if server.is_stuck:
        _end_without(f"the engine {server.activity}")
    if not end_copying():
        _end_without("a copy between KV pool and host tier does not end")
    if server.load_error is not None:
        raise ModelError(server.load_error)


def _end_without(what: str) -> NoReturn:
    """End the process, which would wait for something that does not end."""
    click.echo(f"pageglass: {what}; the process ends without it.", err=True)
    _end_at_once(1)


def _end_at_once(code: int) -> NoReturn:
    """End the process and its ranks: one that is stopped would not see that this process is gone."""
    kill_ranks()
    sys.stdout.flush()
    os._exit(code)


def _say(text: str) -> None:
    click.echo(text)
    sys.stdout.flush()
