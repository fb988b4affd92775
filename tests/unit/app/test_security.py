from typing import Any

import pytest

from app.security import MAX_HEADER_BYTES, MAX_TARGET_BYTES, AccessPolicy, check_sizes


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
        "localhost#",
        "localhost?",
        "localhost/",
        "local\thost",
        " localhost",
        "localhost:\xb2",
        "localhost:800000",
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
        "https://localhost:8000",
        "http://localhost",
        "http://localhost:80000",
        "ws://localhost:8000",
        "http://localhost:8000/",
        "localhost:8000",
        "",
    ],
)
def test_foreign_origins_may_neither_open_sockets_nor_change_anything(
    kind: str, method: str, origin: str
) -> None:
    assert status(make_scope(kind=kind, method=method, origin=origin)) == 403


@pytest.mark.parametrize("origin", [None, "http://localhost:8000", "HTTP://LOCALHOST:8000"])
def test_own_pages_and_programs_are_served(origin: str | None) -> None:
    assert status(make_scope(kind="websocket", origin=origin)) is None
    assert status(make_scope(method="POST", origin=origin)) is None


@pytest.mark.parametrize("host", ["localhost", "localhost:80", "localhost:"])
@pytest.mark.parametrize("origin", ["http://localhost", "http://localhost:80"])
def test_the_usual_port_may_be_named_or_not(host: str, origin: str) -> None:
    assert status(make_scope(method="POST", host=host, origin=origin)) is None


@pytest.mark.parametrize(
    ("host", "origin", "wanted"),
    [
        ("box.example", "https://box.example", None),
        ("localhost:8000", "https://box.example", None),
        ("box.example:8000", "http://box.example:8000", None),
        ("box.example", "https://box.example:8443", 403),
        ("box.example", "http://box.example:3000", 403),
        ("localhost:8000", "http://box.example", 403),
        ("box.example", "https://other.example", 403),
    ],
)
def test_pages_of_a_listed_host_come_from_the_same_port_or_through_a_tls_proxy(
    host: str, origin: str, wanted: int | None
) -> None:
    scope = make_scope(method="POST", host=host, origin=origin)
    assert status(scope, allowed=("box.example",)) == wanted


def test_an_address_and_headers_without_end_are_refused() -> None:
    scope = make_scope() | {"raw_path": b"/", "query_string": b""}
    assert check_sizes(scope) is None
    too_long = check_sizes(scope | {"query_string": b"a" * MAX_TARGET_BYTES})
    assert too_long is not None
    assert too_long.status == 414
    too_many = check_sizes(scope | {"headers": [(b"a", b"b" * 99)] * (MAX_HEADER_BYTES // 100 + 1)})
    assert too_many is not None
    assert too_many.status == 431


def test_reading_is_not_bound_to_an_origin() -> None:
    assert status(make_scope(method="GET", origin="http://evil.example")) is None
