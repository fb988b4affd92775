from typing import Any

import pytest

from app.security import AccessPolicy


def make_scope(
    *, host: str | None = "localhost:8000", origin: str | None = None, kind: str = "http", method: str = "GET"
) -> Any:
    headers = [] if host is None else [(b"host", host.encode("latin-1"))]
    if origin is not None:
        headers.append((b"origin", origin.encode("latin-1")))
    scope: dict[str, Any] = {"type": kind, "headers": headers, "path": "/"}
    if kind == "http":
        scope["method"] = method
    return scope


def status(scope: Any, *, bound: str = "127.0.0.1", allowed: tuple[str, ...] = ()) -> int | None:
    refusal = AccessPolicy(bound, allowed).check(scope)
    return None if refusal is None else refusal.status


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:8000", "LOCALHOST:1", "localhost.", "127.0.0.1:9", "[::1]", "[::1]:8000"],
)
def test_local_names_are_served_on_any_port(host: str) -> None:
    assert status(make_scope(host=host)) is None


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.nip.io",
        "evil.example:8000",
        "localhost@evil.example",
        "localhost:8000/path",
        "localhost:port",
        "[::1",
        "",
        "localhost,evil.example",
        "2130706433",
    ],
)
def test_foreign_and_malformed_hosts_are_refused(host: str) -> None:
    assert status(make_scope(host=host)) == 421


def test_a_forwarded_host_is_not_believed() -> None:
    scope = make_scope(host="evil.example")
    scope["headers"].append((b"x-forwarded-host", b"localhost"))
    assert status(scope) == 421


def test_a_request_without_host_or_with_two_is_refused() -> None:
    twice = make_scope()
    twice["headers"].append((b"host", b"localhost"))
    assert status(make_scope(host=None)) == 400
    assert status(twice) == 400


def test_bound_and_listed_hosts_are_served() -> None:
    assert status(make_scope(host="10.0.0.7:8000"), bound="10.0.0.7") is None
    assert status(make_scope(host="box.example"), allowed=("Box.Example.",)) is None
    assert status(make_scope(host="box.example")) == 421


@pytest.mark.parametrize(("kind", "method"), [("websocket", "GET"), ("http", "POST"), ("http", "DELETE")])
@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "http://localhost:3000",
        "http://127.0.0.1:8000",
        "https://localhost:8000.evil.example",
        "null",
        "file://",
        "chrome-extension://abc",
        "localhost:8000",
        "",
    ],
)
def test_foreign_origins_may_neither_open_sockets_nor_change_anything(
    kind: str, method: str, origin: str
) -> None:
    assert status(make_scope(kind=kind, method=method, origin=origin)) == 403


@pytest.mark.parametrize(
    "origin", [None, "http://localhost:8000", "HTTP://LOCALHOST:8000", "https://localhost:8000"]
)
def test_own_pages_and_programs_are_served(origin: str | None) -> None:
    assert status(make_scope(kind="websocket", origin=origin)) is None
    assert status(make_scope(method="POST", origin=origin)) is None


def test_pages_of_a_listed_host_are_served_whatever_the_port() -> None:
    scope = make_scope(method="POST", origin="https://box.example")
    assert status(scope, allowed=("box.example",)) is None
    assert status(scope) == 403


def test_reading_is_not_bound_to_an_origin() -> None:
    assert status(make_scope(method="GET", origin="http://evil.example")) is None
