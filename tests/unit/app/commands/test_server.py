"""How the server process ends, whatever has not."""

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

import app.commands.server
from app.commands.server import run_server
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
