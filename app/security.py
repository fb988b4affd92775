"""Who may talk to the server through a browser: one guard for HTTP and WebSocket.

A page on another site must not reach a server on the user's own machine. Two checks stop it: the Host
header must name this server (against DNS rebinding), and the Origin of a WebSocket or of anything that
may change something must be this server (against cross-site requests). Programs send no Origin and
are not affected. The guard also bounds what a request says before its body.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send

LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
POLICY_VIOLATION = 1008

MAX_HEADER_BYTES = 32 * 1024
"""Names and values of all headers of a request."""

MAX_TARGET_BYTES = 8 * 1024
"""Path and query of a request, as sent."""

_HTTP_PORT = 80
_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{0,5}))?", re.ASCII | re.IGNORECASE)

SECURITY_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (
        b"content-security-policy",
        (
            b"default-src 'self'; connect-src 'self'; img-src 'self' data:; object-src 'none'; "
            b"base-uri 'none'; frame-ancestors 'none'; form-action 'self'"
        ),
    ),
    (b"x-content-type-options", b"nosniff"),
    # Not no-referrer: with it browsers send forms of our own pages with `Origin: null`, which is refused.
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
)

RenderRefusal = Callable[[str, int, str], tuple[str, bytes]]
"""From path, status and message to media type and body of a refusal."""


@dataclass(frozen=True)
class Refusal:
    """Why a connection is not let in."""

    status: int
    message: str


class AccessPolicy:
    """Decides by Host and Origin. Names are compared without case, trailing dot and port."""

    def __init__(self, bound_host: str, allowed_hosts: Iterable[str]) -> None:
        """`allowed_hosts` are names beside localhost and the address that the server is bound to."""
        self._listed = frozenset(_normalise(name) for name in allowed_hosts)
        self._hosts = LOCAL_HOSTS | {_normalise(bound_host)} | self._listed

    def check(self, scope: Scope) -> Refusal | None:
        """Return why a connection is refused, None if it is not."""
        hosts = _get_headers(scope, b"host")
        if len(hosts) != 1:
            return Refusal(400, "The request must have one Host header.")
        host = _split_host(hosts[0])
        if host is None or host[0] not in self._hosts:
            return Refusal(
                421,
                f"The host {hosts[0][:128]!r} is not served here; --allowed-host adds a name.",
            )
        if scope["type"] == ScopeType.WEBSOCKET or scope["method"] not in SAFE_METHODS:
            for origin in _get_headers(scope, b"origin"):
                if not self._is_own(origin, host):
                    return Refusal(403, f"Requests from pages of {origin[:128]!r} are not taken.")
        return None

    def _is_own(self, origin: str, host: tuple[str, int]) -> bool:
        """Whether a page of `origin` was served under `host`, or under a listed name by a TLS proxy.

        This server speaks http only, so that a page of https can be its own only through a proxy, which
        then has the usual port and may give another Host.
        """
        scheme, _, netloc = origin.partition("://")
        found = _split_host(netloc)
        if found is None:
            return False
        if scheme.lower() == "https":
            return ":" not in netloc and found[0] in self._listed
        return scheme.lower() == "http" and found == host


def check_sizes(scope: Scope) -> Refusal | None:
    """Return why a request says too much before its body, None if it does not."""
    target = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    if target > MAX_TARGET_BYTES:
        return Refusal(414, f"The address has {target} bytes; allowed: {MAX_TARGET_BYTES}.")
    headers = sum(len(name) + len(value) for name, value in scope["headers"])
    if headers > MAX_HEADER_BYTES:
        return Refusal(431, f"The headers have {headers} bytes; allowed: {MAX_HEADER_BYTES}.")
    return None


class SecurityGuard:
    """Wraps the whole application: refuses by the policy and sets the security headers."""

    def __init__(self, app: ASGIApp, policy: AccessPolicy, render_refusal: RenderRefusal) -> None:
        """Guard `app`."""
        self._app = app
        self._policy = policy
        self._render_refusal = render_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the connection in or answer it."""
        refusal = check_sizes(scope) or self._policy.check(scope)
        if scope["type"] == ScopeType.WEBSOCKET:
            if refusal is not None:
                # Before it is accepted, so that the handshake itself fails.
                await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": refusal.message})
                return
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message["headers"])
                present = {name.lower() for name, _ in headers}
                message["headers"] = headers + [item for item in SECURITY_HEADERS if item[0] not in present]
            await send(message)

        if refusal is None:
            await self._app(scope, receive, send_with_headers)
        else:
            await self._refuse(scope["path"], refusal, send_with_headers)

    async def _refuse(self, path: str, refusal: Refusal, send: Send) -> None:
        media_type, body = self._render_refusal(path, refusal.status, refusal.message)
        headers = [
            (b"content-type", media_type.encode()),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})


def _get_headers(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key.lower() == name]


def _split_host(netloc: str) -> tuple[str, int] | None:
    """Return normalised name and port (that of http without one) of `name[:port]`, None if malformed."""
    found = _AUTHORITY.fullmatch(netloc)
    if found is None:
        return None
    return _normalise(found[1]), int(found[2] or _HTTP_PORT)


def _normalise(name: str) -> str:
    return name.strip().lower().strip("[]").removesuffix(".")
