"""What goes wrong, as HTTP: one table from exceptions to answers, two shapes of body.

Everything under `/v1` answers in OpenAI's shape, so that client libraries show the message; all other
paths use problem details (RFC 9457).
"""

import logging
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import msgspec
from litestar import MediaType, Request, Response
from litestar.exceptions import HTTPException

from app.request_labels import is_api_path
from engine.errors import (
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    EngineError,
    ModelError,
    QueueFullError,
    RankError,
    RequestError,
)

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1
PROBLEM_MEDIA_TYPE = "application/problem+json"


class UnavailableError(EngineDeadError):
    """The engine takes no requests now; `retry_after_s` says when it may, None that it will not."""

    def __init__(self, message: str, *, code: str, retry_after_s: int | None) -> None:
        """Keep the code and the waiting time beside the message."""
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


class InterruptedAnswerError(EngineError):
    """A request was taken but its answer cannot be completed."""

    def __init__(self, message: str, *, code: str) -> None:
        """Keep the code beside the message."""
        super().__init__(message)
        self.code = code


class HistoryUnavailableError(EngineError):
    """The history cannot be read now; the message says why and what to do."""


class NotInHistoryError(EngineError):
    """What was asked for is not recorded; the message says what is."""


class SessionRunningError(EngineError):
    """What was asked for is only possible once the session has ended."""


class ModelNotFoundError(RequestError):
    """The request names a model that is not served."""


class UnsupportedMediaTypeError(RequestError):
    """The body is not JSON."""


@dataclass(frozen=True)
class ErrorInfo:
    """An error ready to be told to a client. `kind` is OpenAI's `type`, `code` a stable word."""

    status: int
    kind: str
    code: str
    message: str
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)


INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"

_TABLE: tuple[tuple[type[EngineError], int, str, str], ...] = (
    (ModelNotFoundError, 404, INVALID_REQUEST, "model_not_found"),
    (UnsupportedMediaTypeError, 415, INVALID_REQUEST, "unsupported_media_type"),
    (ContextLengthError, 400, INVALID_REQUEST, "context_length_exceeded"),
    (QueueFullError, 429, "rate_limit_error", "queue_full"),
    (RequestError, 400, INVALID_REQUEST, "invalid_request"),
    (UnavailableError, 503, SERVER_ERROR, "engine_unavailable"),
    (InterruptedAnswerError, 503, SERVER_ERROR, "interrupted"),
    (EngineDeadError, 503, SERVER_ERROR, "engine_unavailable"),
    (NotInHistoryError, 404, INVALID_REQUEST, "not_found"),
    (SessionRunningError, 409, INVALID_REQUEST, "session_running"),
    (HistoryUnavailableError, 503, SERVER_ERROR, "history_unavailable"),
    (RankError, 503, SERVER_ERROR, "rank_lost"),
    (ModelError, 500, SERVER_ERROR, "model_error"),
    (ConfigError, 500, SERVER_ERROR, "config_error"),
    (EngineError, 500, SERVER_ERROR, "engine_error"),
)
"""Class, status, OpenAI type, code unless the error has one; the first class that fits counts."""

_HTTP_CODES = {
    400: "invalid_request",
    403: "origin_not_allowed",
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
    414: "address_too_long",
    415: "unsupported_media_type",
    421: "host_not_allowed",
    431: "headers_too_large",
}


def describe_error(error: Exception) -> ErrorInfo:
    """Return what a client is told about an exception; nothing internal is in it."""
    if isinstance(error, EngineError):
        for kind, status, openai_type, code in _TABLE:
            if isinstance(error, kind):
                return ErrorInfo(
                    status=status,
                    kind=openai_type,
                    code=getattr(error, "code", None) or code,
                    message=str(error),
                    param=getattr(error, "param", None),
                    headers=_retry_header(error),
                )
    if isinstance(error, HTTPException):
        code = _http_code(error.status_code)
        kind_name = SERVER_ERROR if error.status_code >= 500 else INVALID_REQUEST
        message = error.detail or HTTPStatus(error.status_code).phrase
        return ErrorInfo(error.status_code, kind_name, code, message, headers=dict(error.headers or {}))
    return ErrorInfo(500, SERVER_ERROR, "internal_error", "The server failed; its log says why.")


def render_error(path: str, info: ErrorInfo) -> tuple[str, bytes]:
    """Return media type and body of an error in the shape that `path` asks for."""
    if is_api_path(path):
        return MediaType.JSON.value, msgspec.json.encode(openai_error(info))
    problem = {
        "type": f"urn:pageglass:error:{info.code}",
        "title": HTTPStatus(info.status).phrase,
        "status": info.status,
        "detail": info.message,
        "code": info.code,
        "param": info.param,
    }
    return PROBLEM_MEDIA_TYPE, msgspec.json.encode(problem)


def render_refusal(path: str, status: int, message: str) -> tuple[str, bytes]:
    """Return media type and body for a connection that is not let in."""
    return render_error(path, ErrorInfo(status, INVALID_REQUEST, _http_code(status), message))


def _http_code(status: int) -> str:
    return _HTTP_CODES.get(status, f"http_{status}")


def openai_error(info: ErrorInfo) -> dict[str, Any]:
    """Return the error object of the OpenAI API."""
    return {
        "error": {"message": info.message, "type": info.kind, "param": info.param, "code": info.code},
    }


def handle_exception(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """Answer any exception of a handler, a dependency or the framework."""
    info = describe_error(error)
    path = request.scope["path"]
    if info.code == "internal_error":
        logger.error("%s %s failed", request.method, path, exc_info=error)
    media_type, body = render_error(path, info)
    return Response(body, status_code=info.status, media_type=media_type, headers=dict(info.headers))


def _retry_header(error: EngineError) -> dict[str, str]:
    if isinstance(error, QueueFullError):
        return {"retry-after": str(RETRY_AFTER_S)}
    if isinstance(error, UnavailableError) and error.retry_after_s is not None:
        return {"retry-after": str(error.retry_after_s)}
    return {}
