"""The `x-request-id` header: every answer of the API carries the caller's own label, or one of ours."""

from uuid import uuid4

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send

MAX_LABEL_CHARS = 128
REQUEST_ID_HEADER = "x-request-id"


def is_api_path(path: str) -> bool:
    """Whether a path belongs to the OpenAI-compatible API."""
    return path == "/v1" or path.startswith("/v1/")


def find_label(text: str) -> str | None:
    """Return the caller's own name for a request if it is short and printable.

    It is echoed and logged; it never identifies anything inside.
    """
    if 0 < len(text) <= MAX_LABEL_CHARS and text.isascii() and text.isprintable():
        return text
    return None


class RequestLabels:
    """Wraps the whole application, refusals included; labels each answer below `/v1` that has none."""

    def __init__(self, app: ASGIApp) -> None:
        """Label the answers of `app`."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != ScopeType.HTTP or not is_api_path(scope["path"]):
            await self._app(scope, receive, send)
            return
        name = REQUEST_ID_HEADER.encode()

        async def send_labelled(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message["headers"])
                if all(key.lower() != name for key, _ in headers):
                    sent = (value.decode("latin-1") for key, value in scope["headers"] if key.lower() == name)
                    label = find_label(next(sent, "")) or f"req-{uuid4().hex}"
                    headers.append((name, label.encode()))
                message["headers"] = headers
            await send(message)

        await self._app(scope, receive, send_labelled)
