"""How the server process ends, whatever has not."""

import gc
import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn

import app.commands.server
from app.asgi import create_app
from app.commands.server import make_server, run_server
from app.engine_host import HostStatus
from app.plugins import ApplicationPlugin
from app.settings import Settings
from engine.errors import ModelError


class Exited(Exception):  # noqa: N818 - the end of a process, not an error
    pass


def end_server(monkeypatch: pytest.MonkeyPatch, *, copies_end: bool, **server: Any) -> None:
    """Run a server that has ended already; raises `Exited` with the status of a process that is cut off."""

    def cut_off(status: int) -> None:
        raise Exited(status)

    ended = SimpleNamespace(run=lambda _: None, handle_exit=None, activity="is stuck in a step", **server)
    module = app.commands.server
    monkeypatch.setattr(module, "raise_open_files_limit", lambda: None)
    monkeypatch.setattr(module, "create_app", lambda _: None)
    monkeypatch.setattr(module, "make_server", lambda *_: ended)
    monkeypatch.setattr(module, "end_copying", lambda: copies_end)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(os, "_exit", cut_off)
    run_server(Settings(), [], "http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("is_stuck", "copies_end", "message"),
    [
        (True, True, "the engine is stuck in a step"),
        (True, False, "the engine is stuck in a step"),
        (False, False, "a copy between KV pool and host tier does not end"),
    ],
)
def test_a_process_is_cut_off_from_what_does_not_end(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    is_stuck: bool,
    copies_end: bool,
    message: str,
) -> None:
    with pytest.raises(Exited) as caught:
        end_server(monkeypatch, copies_end=copies_end, is_stuck=is_stuck, load_error=None)
    assert caught.value.args == (1,)
    assert capsys.readouterr().err == f"pageglass: {message}; the process ends without it.\n"


def test_a_server_that_has_ended_ends_its_process_as_usual(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    end_server(monkeypatch, copies_end=True, is_stuck=False, load_error=None)
    with pytest.raises(ModelError, match="cut off"):
        end_server(monkeypatch, copies_end=True, is_stuck=False, load_error="The file is cut off.")
    assert capsys.readouterr().err == ""


def test_what_is_loaded_is_never_looked_through_for_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    application = create_app(Settings(), lambda *_: pytest.fail("it loads"))
    server = make_server(application, Settings(), "http://127.0.0.1:1")
    host = application.plugins.get(ApplicationPlugin).host
    states = []

    def serve(*_: Any) -> None:
        for status in (HostStatus.LOADING, HostStatus.READY, HostStatus.DRAINING):
            host._set_status(status)
            states.append((gc.isenabled(), gc.get_freeze_count() > 10_000))

    monkeypatch.setattr(uvicorn.Server, "run", serve)
    try:
        server.run([])
        assert states == [(False, False), (True, True), (True, True)]
        num_set_aside = gc.get_freeze_count()
        host._set_status(HostStatus.READY)  # as after a restart of ranks
        assert gc.get_freeze_count() == num_set_aside
    finally:
        gc.enable()
        gc.unfreeze()
