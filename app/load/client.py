"""One HTTP client that streams answers and takes the times of their pieces."""

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

import httpx
import msgspec

from app.load.files import LoadError
from app.load.workload import Body

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 600.0
"""Between two pieces; a request may wait that long in the server's queue."""

_DATA_PREFIX = "data:"
_DONE = "[DONE]"
_CONTEXT_CODE = "context_length_exceeded"
_HTTP_OK = 200


@dataclass(frozen=True)
class ServerInfo:
    """What the server says about the model to use; None where it does not say."""

    model: str
    max_model_len: int | None
    vocab_size: int | None


@dataclass
class Outcome:
    """How one request went; times in seconds."""

    error: str | None = None
    is_over_context: bool = False
    text: str = ""
    ttft_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    num_output_tokens: int = 0


class _RequestFailedError(Exception):
    """The server answered, but not with a whole stream; the message names the failure in a few words."""


class LoadClient:
    """Talks to the OpenAI-compatible API of one server; use it as an async context manager."""

    def __init__(self, url: str, *, concurrency: int, api_key: str | None = None) -> None:
        """Take the server's base URL; raises `LoadError` if it is not an HTTP URL."""
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.netloc:
            raise LoadError(f"{url!r} is not a URL such as http://127.0.0.1:8000.")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
            trust_env=False,  # the traffic goes to the named server, never to a proxy
        )

    async def __aenter__(self) -> Self:
        """Return the client itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def server_info(self, model: str | None) -> ServerInfo:
        """Return what `/v1/models` says about a model, by default about the first one.

        Raises `LoadError` when the server cannot be reached or does not have the model.
        """
        try:
            response = await self._http.get("/v1/models")
            if response.status_code != _HTTP_OK:
                raise LoadError(f"{self.url}/v1/models answers {_short_error(response)}.")
            entries = response.json()["data"]
            found = [entry for entry in entries if model is None or entry["id"] == model]
            if not found:
                names = ", ".join(entry["id"] for entry in entries) or "none; it may still be loading"
                raise LoadError(f"The server has no model{f' {model}' if model else ''} (it has: {names}).")
            entry = found[0]
            return ServerInfo(entry["id"], entry.get("max_model_len"), entry.get("vocab_size"))
        except httpx.HTTPError as error:
            raise LoadError(f"No answer from {self.url}: {_transport_failure(error)}.") from error
        except (ValueError, KeyError, TypeError) as error:
            raise LoadError(f"{self.url}/v1/models does not answer in the OpenAI format.") from error

    async def priority_classes(self) -> list[str] | None:
        """Return the names that priorities may have; None if the server, of another kind, does not say."""
        try:
            response = await self._http.get("/api/engine/policy")
            return list(response.json()["priority_classes"]) if response.status_code == _HTTP_OK else None
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return None

    async def send(self, path: str, body: Body, on_piece: Callable[[], None]) -> Outcome:
        """Send one request, read its stream to the end and return how it went; failures do not raise.

        `on_piece` is called for each piece of the answer.
        """
        outcome = Outcome()
        try:
            await self._stream(path, body, outcome, on_piece)
        except _RequestFailedError as error:
            outcome.error = str(error)
        except httpx.HTTPError as error:
            outcome.error = _transport_failure(error)
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError, IndexError):
            outcome.error = "answer not in the OpenAI format"
        return outcome

    async def _stream(self, path: str, body: Body, outcome: Outcome, on_piece: Callable[[], None]) -> None:
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        started = last = time.perf_counter()
        pieces: list[str] = []
        async with self._http.stream("POST", path, json=streamed) as response:
            await _check_status(response, outcome)
            async for event in _events(response):
                usage = event.get("usage")
                if usage:
                    outcome.num_output_tokens = usage["completion_tokens"]
                piece = _piece(event)
                if piece is None:
                    continue
                now = time.perf_counter()
                if outcome.ttft_s is None:
                    outcome.ttft_s = now - started
                else:
                    outcome.gaps_s.append(now - last)
                last = now
                pieces.append(piece)
                on_piece()
        outcome.text = "".join(pieces)


async def _check_status(response: httpx.Response, outcome: Outcome) -> None:
    if response.status_code != _HTTP_OK:
        await response.aread()
        outcome.is_over_context = _error_code(_json_or_none(response)) == _CONTEXT_CODE
        raise _RequestFailedError(_short_error(response))


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON events of a stream; a stream without its end mark is a failure."""
    async for line in response.aiter_lines():
        if not line.startswith(_DATA_PREFIX):
            continue
        data = line.removeprefix(_DATA_PREFIX).strip()
        if data == _DONE:
            return
        event = msgspec.json.decode(data, type=dict[str, Any])
        if event.get("error"):
            raise _RequestFailedError(_error_code(event) or "error in the stream")
        yield event
    raise _RequestFailedError("stream cut short")


def _piece(event: dict[str, Any]) -> str | None:
    """Return the text of an event, None if it carries none."""
    if not event.get("choices"):
        return None
    choice = event["choices"][0]
    text = choice["delta"].get("content") if "delta" in choice else choice["text"]
    return text or None


def _json_or_none(response: httpx.Response) -> Any:
    try:
        return msgspec.json.decode(response.content)
    except msgspec.DecodeError:
        return None


def _error_code(answer: Any) -> str | None:
    """Return the code, or else the type, of an error in the OpenAI format."""
    error = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(error, dict):
        return None
    code = error.get("code") or error.get("type")
    return str(code)[:60] if code else None


def _short_error(response: httpx.Response) -> str:
    return f"{response.status_code} {_error_code(_json_or_none(response)) or response.reason_phrase}".strip()


def _transport_failure(error: httpx.HTTPError) -> str:
    match error:
        case httpx.ConnectError() | httpx.ConnectTimeout():
            return "no connection"
        case httpx.TimeoutException():
            return "timed out"
        case _:
            return "connection lost"
