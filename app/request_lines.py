"""What a request line may say, made regular before anything judges it.

HEAD is answered as GET without the body, and a target with scheme and host (which every server must
take, RFC 9112, 3.2.2) as its path, with that host in place of the Host header's.
"""

from urllib.parse import unquote

from litestar.enums import ScopeType
from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send

_SCHEMES = (b"http", b"https")


class RequestLines:
    """Wraps the whole application."""

    def __init__(self, app: ASGIApp) -> None:
        """Give `app` regular requests."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        scope = _strip_authority(scope)
        if scope["type"] == ScopeType.HTTP and scope["method"] == "HEAD":
            await self._app(_as_get(scope), receive, _without_body(send))
        elif scope["type"] == ScopeType.HTTP:
            await self._app(scope, receive, _with_head_allowed(send))
        else:
            await self._app(scope, receive, send)


def _strip_authority(scope: Scope) -> Scope:
    """Return the scope with a path alone, and the host of the target as its Host header."""
    raw_path = scope.get("raw_path") or b""
    scheme, separator, rest = raw_path.partition(b"://")
    if not separator or scheme.lower() not in _SCHEMES:
        return scope
    authority, _, path = rest.partition(b"/")
    raw_path = b"/" + path
    regular = scope.copy()
    regular["raw_path"] = raw_path
    regular["path"] = unquote(raw_path.decode("ascii", "replace"))
    others = [(name, value) for name, value in scope["headers"] if name.lower() != b"host"]
    regular["headers"] = [(b"host", authority), *others]
    return regular


def _as_get(scope: HTTPScope) -> HTTPScope:
    regular = scope.copy()
    regular["method"] = "GET"
    return regular


def _without_body(send: Send) -> Send:
    """Keep the headers, the length included, and drop the content."""

    async def send_head(message: Message) -> None:
        if message["type"] == "http.response.body":
            message["body"] = b""
        await send(message)

    return _with_head_allowed(send_head)


def _with_head_allowed(send: Send) -> Send:
    """Name HEAD beside GET where an answer lists the methods of a path."""

    async def send_allowing(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == 405:
            message["headers"] = [_allow_head(name, value) for name, value in message["headers"]]
        await send(message)

    return send_allowing


def _allow_head(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    methods = [method.strip() for method in value.split(b",")]
    if name.lower() == b"allow" and b"GET" in methods and b"HEAD" not in methods:
        return name, b", ".join(sorted([*methods, b"HEAD"]))
    return name, value
