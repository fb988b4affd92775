"""Who sends a request, so far as it can be told: for the limit of open requests of one client."""

from hashlib import sha256
from typing import Any

from litestar import Request

_SCHEME = "bearer"


def identify_client(request: Request[Any, Any, Any], user: object) -> bytes:
    """Return the same bytes for all requests of one client.

    It is known by its API key, else by the `user` of its request, else by its address. Keys are secrets and
    names may be long: only their SHA-256 is kept.
    """
    scheme, _, token = request.headers.get("authorization", "").strip().partition(" ")
    if scheme.lower() == _SCHEME and token.strip():
        return _digest("key", token.strip())
    if isinstance(user, str) and user:
        return _digest("user", user)
    return _digest("address", request.client.host if request.client is not None else "")


def _digest(kind: str, text: str) -> bytes:
    return sha256(f"{kind} {text}".encode("utf-8", "surrogatepass")).digest()
