"""What the API answers to everything that is wrong, over a fake engine in this process."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import httpx
import pytest

from tests.support.api import MODEL, Api, running_api, served_api, until
from tests.support.fake_engine import FakeEngine

USER = [{"role": "user", "content": "hi"}]
HUGE = 10**6


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    async with running_api() as running:
        yield running
        # Whatever was sent: the engine lives and nothing is left in it.
        assert (await running.complete("still there", max_tokens=2)).status_code == 200
        await until(lambda: not running.engine.core.has_work)
        running.engine.core.check_integrity()


def error_of(response: Any) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    error: dict[str, Any] = body["error"]
    return error


CHAT_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    ({"messages": [*USER, {"role": 1, "content": "hi"}]}, "messages[1].role"),
    ({"messages": USER * 257}, "messages"),
    ({"messages": [{"role": "user", "content": "template error"}]}, "messages"),
    (
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]},
        "messages[0].tool_calls",
    ),
    ({"model": None}, "model"),
    ({"model": 5}, "model"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": []}, "stream_options"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"logprobs": True}, "logprobs"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
]

SHARED_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n"),
    ({"n": 9}, "n"),
    ({"n": HUGE}, "n"),
    ({"n": 2**63}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "8"}, "max_tokens"),
    ({"max_tokens": 4, "max_completion_tokens": 5}, "max_completion_tokens"),
    ({"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 8, "max_completion_tokens": -1}, "max_completion_tokens"),
    ({"max_tokens": None, "max_completion_tokens": 2**31}, "max_completion_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.01}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"top_k": 2**63, "top_p": 0.9}, "top_k"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 2**70}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "x" * 257}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop_token_ids": [95]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [999999999]}, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"frequency_penalty": -2}, "frequency_penalty"),
    ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ({"min_p": 0.1}, "min_p"),
]

PROMPTS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [[1], 1]}, "prompt"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [[1, "a"]]}, "prompt[0][1]"),
    ({"prompt": [95]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [2**63]}, "prompt"),
    ({"prompt": [999999999]}, "prompt"),
    ({"prompt": ["a"] * 65}, "prompt"),
    ({"prompt": ["a"] * 9, "n": 8}, "n"),
    ({"prompt": [1, "a"] * 50_000}, "prompt"),
    ({"prompt": [[1]] * 100_000}, "prompt"),
    ({"echo": True}, "echo"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"logprobs": 0}, "logprobs"),
]


@pytest.mark.parametrize(("fields", "param"), [*CHAT_FIELDS, *SHARED_FIELDS])
async def test_a_wrong_field_of_a_chat_is_named(api: Api, fields: dict[str, Any], param: str) -> None:
    response = await api.chat(**fields)
    error = error_of(response)
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert error["code"]


@pytest.mark.parametrize(("fields", "param"), [*PROMPTS, *SHARED_FIELDS])
async def test_a_wrong_field_of_a_completion_is_named(api: Api, fields: dict[str, Any], param: str) -> None:
    response = await api.complete(**fields)
    assert (response.status_code, error_of(response)["param"]) == (400, param)


BODIES: list[bytes] = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"text"',
    b'{"model": "fake",}',
    b'{"model": "fake", "prompt": NaN}',
    b'{"model": "fake", "prompt": "a", "temperature": NaN}',
    b'{"model": "fake", "prompt": "a", "temperature": Infinity}',
    b'{"model": "fake", "prompt": "a", "temperature": -Infinity}',
    b'{"model": "fake", "prompt": "a", "temperature": 1e999}',
    b'{"model": "fake", "prompt": "a", "seed": 1' + b"0" * 5000 + b"}",
    b'{"model": "fake", "prompt": "\xff"}',
    b'{"model": "fake", "prompt": "\\ud800"}',
    b'{"model": "fake", "prompt": "\\ud800 \\udc00"}',
    b"\xef\xbb\xbf{}",
    b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"unknown": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b"\x00",
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
async def test_a_body_that_is_no_json_object_is_refused(api: Api, path: str, body: bytes) -> None:
    response = await api.client.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


async def test_of_duplicate_keys_the_last_counts(api: Api) -> None:
    body = b'{"model": "fake", "prompt": "a", "max_tokens": 9, "max_tokens": 2}'
    response = await api.client.post(
        "/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    assert response.json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "json"])
async def test_only_json_is_taken(api: Api, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    response = await api.client.post("/v1/completions", content=b"{}", headers=headers)
    assert response.status_code == 415
    assert "application/json" in error_of(response)["message"]


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "application/json; charset=latin-1"},
        {"content-type": 'application/json;charset="utf-16"'},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
)
async def test_only_plain_utf_8_is_taken(api: Api, headers: dict[str, str]) -> None:
    response = await api.client.post("/v1/completions", content=b"{}", headers=headers)
    assert (response.status_code, error_of(response)["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "Application/JSON; Charset=UTF-8; x=y"},
        {"content-type": 'application/json;charset="utf-8"'},
        {"content-type": "application/json", "content-encoding": "identity"},
    ],
)
async def test_utf_8_may_be_said(api: Api, headers: dict[str, str]) -> None:
    content = b'{"model": "fake", "prompt": "a", "max_tokens": 1}'
    response = await api.client.post("/v1/completions", content=content, headers=headers)
    assert response.status_code == 200


async def test_a_body_over_four_mebibytes_is_refused(api: Api) -> None:
    headers = {"content-type": "application/json"}
    fitting = await api.client.post("/v1/completions", content=b" " * (4 * 2**20), headers=headers)
    over = await api.client.post("/v1/completions", content=b" " * (4 * 2**20 + 1), headers=headers)
    assert (fitting.status_code, over.status_code) == (400, 413)
    assert error_of(over)["code"] == "request_too_large"


async def test_unknown_paths_and_methods_have_the_same_shape(api: Api) -> None:
    unknown = await api.client.get("/v1/nothing")
    wrong_method = await api.client.get("/v1/chat/completions")
    assert (unknown.status_code, error_of(unknown)["code"]) == (404, "not_found")
    assert (wrong_method.status_code, error_of(wrong_method)["code"]) == (405, "method_not_allowed")
    assert "POST" in wrong_method.headers["allow"]


async def test_our_own_api_uses_problem_details(api: Api) -> None:
    response = await api.client.get("/api/nothing")
    assert response.status_code == 404
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert (problem["status"], problem["type"]) == (404, "urn:pageglass:error:not_found")


async def test_an_unknown_model_is_not_found(api: Api) -> None:
    for response in (
        await api.chat(model="gpt-4"),
        await api.complete(model="gpt-4"),
        await api.client.get("/v1/models/gpt-4"),
        await api.client.get("/v1/models/a/b"),
    ):
        assert response.status_code == 404
        assert error_of(response)["code"] == "model_not_found"
        assert error_of(response)["param"] == "model"


@pytest.mark.parametrize("fields", [{"max_tokens": 1}, {"max_tokens": None}, {"max_tokens": 500}])
async def test_a_prompt_must_leave_room_for_one_token(api: Api, fields: dict[str, Any]) -> None:
    fitting = await api.complete("x" * 127, **fields)
    assert fitting.json()["usage"]["completion_tokens"] == 1
    assert fitting.json()["choices"][0]["finish_reason"] == "length"
    for length in (128, 129, 5000):
        response = await api.complete("x" * length, **fields)
        error = error_of(response)
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["param"] == "prompt"
        assert str(length) in error["message"]
        assert "127" in error["message"]
    assert error_of(await api.chat("x" * 200))["param"] == "messages"


async def test_a_request_that_can_never_fit_does_not_block_others() -> None:
    async with running_api(FakeEngine(num_blocks=2, max_model_len=128)) as api:
        refused = await api.complete("x" * 8)
        assert error_of(refused)["code"] == "context_length_exceeded"
        assert (await api.complete("abc", max_tokens=2)).status_code == 200


async def test_one_refused_prompt_refuses_them_all(api: Api) -> None:
    response = await api.complete(["fits", "x" * 200])
    assert error_of(response)["code"] == "context_length_exceeded"
    await until(lambda: not api.engine.core.has_work)
    assert api.plugin.host.num_open == 0


async def test_a_full_queue_is_429_with_retry_after() -> None:
    engine = FakeEngine(max_num_seqs=1, max_waiting=2)
    engine.runner.step_s = 0.01
    async with served_api(engine) as api:

        def complete(prompts: list[str], max_tokens: int) -> Awaitable[httpx.Response]:
            body = {"model": MODEL, "prompt": prompts, "max_tokens": max_tokens}
            return asyncio.create_task(api.client.post("/v1/completions", json=body))

        first = complete(["a", "b"], 100)
        await until(lambda: len(engine.core.scheduler.state.running) == 1)
        response = await complete(["c", "d"], 1)
        assert (response.status_code, error_of(response)["code"]) == (429, "queue_full")
        assert int(response.headers["retry-after"]) >= 1
        assert MODEL in (await api.client.get("/v1/models")).text
        assert (await first).status_code == 200


async def test_nothing_internal_is_told_about_a_bug(
    api: Api, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.plugin.host.tokenizer, "render_chat", lambda messages: 1 / 0)
    response = await api.chat()
    assert (response.status_code, error_of(response)["type"]) == (500, "server_error")
    assert "division" not in response.text
    assert "ZeroDivisionError" in caplog.text
