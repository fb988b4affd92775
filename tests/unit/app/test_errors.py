import json
from typing import Any

import pytest
from litestar.exceptions import MethodNotAllowedException, NotFoundException

from app.errors import (
    HistoryUnavailableError,
    InterruptedAnswerError,
    ModelNotFoundError,
    NotInHistoryError,
    SessionRunningError,
    UnavailableError,
    UnsupportedMediaTypeError,
    describe_error,
    render_error,
    render_refusal,
)
from engine.errors import (
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    EngineError,
    KernelsUnavailableError,
    ModelError,
    QueueFullError,
    RankError,
    RequestError,
)

CASES: list[tuple[EngineError, int, str, str]] = [
    (EngineError("x"), 500, "server_error", "engine_error"),
    (ConfigError("x"), 500, "server_error", "config_error"),
    (KernelsUnavailableError("x"), 500, "server_error", "config_error"),
    (RankError("x"), 503, "server_error", "rank_lost"),
    (ModelError("x"), 500, "server_error", "model_error"),
    (EngineDeadError("x"), 503, "server_error", "engine_unavailable"),
    (RequestError("x"), 400, "invalid_request_error", "invalid_request"),
    (RequestError("x", code="special"), 400, "invalid_request_error", "special"),
    (ContextLengthError("x"), 400, "invalid_request_error", "context_length_exceeded"),
    (QueueFullError("x"), 429, "rate_limit_error", "queue_full"),
    (ModelNotFoundError("x"), 404, "invalid_request_error", "model_not_found"),
    (UnsupportedMediaTypeError("x"), 415, "invalid_request_error", "unsupported_media_type"),
    (UnavailableError("x", code="loading", retry_after_s=1), 503, "server_error", "loading"),
    (NotInHistoryError("x"), 404, "invalid_request_error", "not_found"),
    (SessionRunningError("x"), 409, "invalid_request_error", "session_running"),
    (HistoryUnavailableError("x"), 503, "server_error", "history_unavailable"),
    (InterruptedAnswerError("x", code="gone"), 503, "server_error", "gone"),
]


@pytest.mark.parametrize(("error", "status", "kind", "code"), CASES)
def test_every_error_has_a_status_and_a_stable_code(
    error: EngineError, status: int, kind: str, code: str
) -> None:
    info = describe_error(error)
    assert (info.status, info.kind, info.code, info.message) == (status, kind, code, "x")


def test_no_kind_of_engine_error_is_missing_from_the_table() -> None:
    def descend(kind: type[EngineError]) -> set[type[EngineError]]:
        return {kind}.union(*(descend(child) for child in kind.__subclasses__()))

    public = {kind for kind in descend(EngineError) if kind.__module__ in {"engine.errors", "app.errors"}}
    assert public == {type(error) for error, *_ in CASES}


def test_the_field_at_fault_is_named_in_both_shapes() -> None:
    info = describe_error(RequestError("bad n", param="n", code="invalid_value"))
    media_type, body = render_error("/v1/completions", info)
    assert media_type == "application/json"
    assert json.loads(body) == {
        "error": {"message": "bad n", "type": "invalid_request_error", "param": "n", "code": "invalid_value"}
    }
    media_type, body = render_error("/api/engine/state", info)
    assert media_type == "application/problem+json"
    assert json.loads(body) == {
        "type": "urn:pageglass:error:invalid_value",
        "title": "Bad Request",
        "status": 400,
        "detail": "bad n",
        "code": "invalid_value",
        "param": "n",
    }


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (NotFoundException(), 404, "not_found"),
        (MethodNotAllowedException(headers={"Allow": "GET"}), 405, "method_not_allowed"),
        (ValueError("secret"), 500, "internal_error"),
        (AssertionError("secret"), 500, "internal_error"),
    ],
)
def test_other_exceptions_tell_nothing_internal(error: Exception, status: int, code: str) -> None:
    info = describe_error(error)
    assert (info.status, info.code) == (status, code)
    assert "secret" not in info.message


@pytest.mark.parametrize(
    ("error", "header"),
    [
        (QueueFullError("x"), {"retry-after": "1"}),
        (UnavailableError("x", code="a", retry_after_s=3), {"retry-after": "3"}),
        (UnavailableError("x", code="a", retry_after_s=None), {}),
    ],
)
def test_a_client_is_told_when_to_come_back(error: Any, header: dict[str, str]) -> None:
    assert describe_error(error).headers == header


def test_refusals_have_the_shape_of_the_path() -> None:
    assert json.loads(render_refusal("/v1", 421, "no")[1])["error"]["code"] == "host_not_allowed"
    assert json.loads(render_refusal("/v1x", 403, "no")[1])["code"] == "origin_not_allowed"
