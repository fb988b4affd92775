"""What the API answers when all is well, over a fake engine in this process."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.builders import solo_output
from tests.support.api import MODEL, Api, read_events, running_api, until
from tests.support.fake_engine import FIRST_LETTER, VOCAB_SIZE, FakeEngine, LetterTokenizer


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    async with running_api() as running:
        yield running


def expected_text(prompt: str, num_tokens: int) -> str:
    token_ids = solo_output(LetterTokenizer().encode(prompt), num_tokens, vocab_size=VOCAB_SIZE)
    return "".join(chr(FIRST_LETTER + token_id) for token_id in token_ids)


def joined(events: list[Any], index: int = 0) -> str:
    return "".join(
        choice.get("text") or choice.get("delta", {}).get("content") or ""
        for event in events[:-1]
        for choice in event["choices"]
        if choice["index"] == index
    )


async def test_a_completion_has_openais_shape(api: Api) -> None:
    response = await api.complete("hello", max_tokens=5)
    body = response.json()
    assert response.status_code == 200
    assert body["id"].startswith("cmpl-")
    assert response.headers["x-request-id"] == body["id"]
    assert (body["object"], body["model"], body["system_fingerprint"]) == ("text_completion", MODEL, None)
    assert body["choices"] == [
        {"index": 0, "text": expected_text("hello", 5), "logprobs": None, "finish_reason": "length"}
    ]
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 5,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_a_chat_has_openais_shape(api: Api) -> None:
    body = (await api.chat("hi")).json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    message = {"role": "assistant", "content": expected_text("user: hi ", 8), "refusal": None}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]


async def test_a_stream_joined_is_the_whole_answer(api: Api) -> None:
    whole = (await api.chat("hi")).json()
    response = await api.chat("hi", stream=True, stream_options={"include_usage": True})
    events = read_events(response.text)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert events[-1] == "[DONE]"
    assert joined(events) == whole["choices"][0]["message"]["content"]
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[-3]["choices"][0]["finish_reason"] == "length"
    last = events[-2]
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert all(event["usage"] is None for event in events[:-2])
    assert len({event["id"] for event in events[:-1]}) == 1


async def test_a_stream_without_include_usage_has_no_usage(api: Api) -> None:
    events = read_events((await api.complete("hi", stream=True)).text)
    assert all("usage" not in event for event in events[:-1])
    assert joined(events) == expected_text("hi", 8)


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_and_choices_come_in_order(api: Api, stream: bool) -> None:
    response = await api.complete(["abc", "defg"], n=2, stream=stream, stream_options={"include_usage": True})
    expected = [expected_text(prompt, 8) for prompt in ("abc", "abc", "defg", "defg")]
    if stream:
        events = read_events(response.text)
        texts = [joined(events, index) for index in range(4)]
        usage = events[-2]["usage"]
    else:
        body = response.json()
        texts = [choice["text"] for choice in body["choices"]]
        usage = body["usage"]
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert texts == expected
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (7, 32)


async def test_token_ids_are_a_prompt_like_text(api: Api) -> None:
    token_ids = LetterTokenizer().encode("hello")
    expected = expected_text("hello", 8)
    for prompt in (token_ids, [token_ids], ["hello"]):
        assert (await api.complete(prompt)).json()["choices"][0]["text"] == expected


async def test_cached_prompt_tokens_are_reported(api: Api) -> None:
    prompt = "a prompt that fills several blocks of four tokens"
    assert (await api.complete(prompt)).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    cached = (await api.complete(prompt)).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == (len(prompt) - 1) // 4 * 4


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_answer_before_it(api: Api, stream: bool) -> None:
    text = expected_text("hello", 30)
    stop = text[10:13]
    response = await api.complete("hello", max_tokens=60, stop=["never-said", stop], stream=stream)
    if stream:
        events = read_events(response.text)
        answer, reason = joined(events), events[-2]["choices"][0]["finish_reason"]
    else:
        choice = response.json()["choices"][0]
        answer, reason = choice["text"], choice["finish_reason"]
    assert (answer, reason) == (text[: text.index(stop)], "stop")
    await until(lambda: not api.engine.core.has_work)


async def test_a_stop_token_ends_the_answer_and_is_counted_but_not_shown(api: Api) -> None:
    text = expected_text("hello", 12)
    stop_token_id = ord(text[5]) - FIRST_LETTER
    first = text.index(text[5])
    body = (await api.complete("hello", max_tokens=30, stop_token_ids=[stop_token_id])).json()
    assert body["choices"][0]["text"] == text[:first]
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == first + 1


async def test_parts_and_developer_messages_are_text_and_system(api: Api) -> None:
    messages = [
        {"role": "developer", "content": "be brief", "name": "boss"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    body = (await api.chat(messages=messages)).json()
    expected = expected_text("system: be brief user: a\nb ", 8)
    assert body["choices"][0]["message"]["content"] == expected


async def test_both_names_of_the_length_limit_are_honoured(api: Api) -> None:
    for fields in ({"max_tokens": 3}, {"max_completion_tokens": 3, "max_tokens": 3}):
        assert (await api.chat(**fields)).json()["usage"]["completion_tokens"] == 3
    body = {"max_tokens": None, "max_completion_tokens": 2}
    for response in (await api.chat(**body), await api.complete(**body)):
        assert response.json()["usage"]["completion_tokens"] == 2


async def test_without_a_limit_chats_use_the_context_and_completions_16_tokens(api: Api) -> None:
    chat = (await api.chat("hi", max_tokens=None)).json()
    assert chat["usage"]["total_tokens"] == 128
    assert chat["choices"][0]["finish_reason"] == "length"
    assert (await api.complete("hi", max_tokens=None)).json()["usage"]["completion_tokens"] == 16


async def test_null_means_the_default_for_every_optional_field(api: Api) -> None:
    names = ["temperature", "top_p", "top_k", "n", "seed", "stop", "stop_token_ids", "ignore_eos", "stream"]
    names += ["stream_options", "tools", "response_format", "logprobs", "logit_bias", "frequency_penalty"]
    assert (await api.chat(**dict.fromkeys(names))).status_code == 200


async def test_fields_that_ask_for_nothing_are_taken_and_unknown_ones_counted(api: Api) -> None:
    harmless = {"tools": [], "logprobs": False, "logit_bias": {}, "presence_penalty": 0.0, "user": "me"}
    harmless["response_format"] = {"type": "text"}
    assert (await api.chat(**harmless, foo=1, bar={"deep": [1]})).status_code == 200
    assert (await api.chat(foo=2)).status_code == 200
    ignored = (await api.client.get("/health")).json()["ignored_fields"]
    assert ignored == {"foo": 2, "bar": 1}


async def test_one_request_counts_few_of_its_unknown_fields(api: Api) -> None:
    assert (await api.chat(**{f"x{index}": 1 for index in range(5000)})).status_code == 200
    ignored = (await api.client.get("/health")).json()["ignored_fields"]
    assert sum(ignored.values()) == 32


async def test_the_models_list_names_the_effective_limit(api: Api) -> None:
    entry = (await api.client.get("/v1/models")).json()["data"][0]
    assert entry == (await api.client.get(f"/v1/models/{MODEL}")).json()
    assert (entry["id"], entry["object"], entry["owned_by"]) == (MODEL, "model", "pageglass")
    assert (entry["max_model_len"], entry["vocab_size"]) == (128, VOCAB_SIZE)


async def test_a_short_printable_label_is_echoed_and_identifies_nothing(api: Api) -> None:
    headers = {"x-request-id": "my label 1"}
    body = {"model": MODEL, "prompt": "a", "max_tokens": 2}
    first = await api.client.post("/v1/completions", json=body, headers=headers)
    second = await api.client.post("/v1/completions", json=body, headers=headers)
    assert first.headers["x-request-id"] == second.headers["x-request-id"] == "my label 1"
    assert first.json()["id"] != second.json()["id"]
    too_long = await api.client.post("/v1/completions", json=body, headers={"x-request-id": "x" * 129})
    assert too_long.headers["x-request-id"] == too_long.json()["id"]


async def test_answers_are_the_same_alone_and_under_preemption() -> None:
    engine = FakeEngine(num_blocks=8, max_model_len=32)
    async with running_api(engine) as api:
        prompts = [f"{letter}{letter}{letter}" for letter in "abcdefgh"]
        body = (await api.complete(prompts, max_tokens=20)).json()
        assert [choice["text"] for choice in body["choices"]] == [
            expected_text(prompt, 20) for prompt in prompts
        ]
        totals = (await api.client.get("/api/engine/state")).json()["totals"]
        assert totals["num_preemptions"] > 0
        assert body["usage"]["completion_tokens"] == 160
