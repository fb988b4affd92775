"""The API of a real `pageglass serve` with the default model, through OpenAI's own client."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from app.model_store import DEFAULT_MODEL
from engine.engine_info import EngineInfo
from tests.support.server import ServerProcess
from tests.support.state import read_state, wait_for_state

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
LONG: dict[str, Any] = {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess() as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as connected:
        yield connected


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    asked: dict[str, Any] = {"model": DEFAULT_MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 12}
    return client.chat.completions.create(**{**asked, **fields})


def test_models_are_listed(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == DEFAULT_MODEL
    assert model.model_dump()["max_model_len"] == 8192
    assert client.models.retrieve(DEFAULT_MODEL).id == DEFAULT_MODEL


def test_a_chat_knows_paris_and_streams_the_same_text(client: openai.OpenAI) -> None:
    whole = ask(client)
    assert "Paris" in whole.choices[0].message.content
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0


def test_a_completion_continues_text_and_token_ids_alike(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": DEFAULT_MODEL, "temperature": 0, "max_tokens": 6}
    text = client.completions.create(prompt=["The capital of France is", "1, 2, 3, 4,"], **fields)
    assert "Paris" in text.choices[0].text
    assert "5" in text.choices[1].text
    stream = client.completions.create(prompt="1, 2, 3, 4,", stream=True, **fields)
    assert "".join(chunk.choices[0].text for chunk in stream) == text.choices[1].text


def test_sixteen_requested_tokens_are_sixteen(client: openai.OpenAI) -> None:
    answer = ask(client, max_tokens=16, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"


def test_a_seed_repeats_an_answer_and_choices_differ(client: openai.OpenAI) -> None:
    first = ask(client, temperature=1.0, seed=7, n=3)
    second = ask(client, temperature=1.0, seed=7, n=3)
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert len(set(texts)) > 1


def test_a_stop_string_is_not_part_of_the_answer(client: openai.OpenAI) -> None:
    answer = ask(client, stop=["Paris"])
    assert "Paris" not in answer.choices[0].message.content
    assert "Pari" not in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


def test_errors_reach_the_client_with_message_and_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        ask(client, model="gpt-4")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as hot:
        ask(client, temperature=3)
    assert hot.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        ask(client, messages=[{"role": "user", "content": "word " * 9000}])
    assert long.value.code == "context_length_exceeded"
    assert "8192" in long.value.message


def test_leaving_a_stream_frees_its_blocks(server: ServerProcess, client: openai.OpenAI) -> None:
    before = read_state(server.url)["totals"]["num_aborted"]
    stream = ask(client, stream=True, **LONG)
    for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    stream.close()
    state = wait_for_state(server.url, lambda state: not state["running"])
    assert state["totals"]["num_aborted"] == before + 1
    assert state["counts"]["used"] == 0


async def test_leaving_before_a_whole_answer_frees_its_blocks(server: ServerProcess) -> None:
    before = read_state(server.url)["totals"]["num_aborted"]
    body = {"model": DEFAULT_MODEL, "messages": QUESTION, "max_tokens": 1500, "ignore_eos": True}
    async with httpx.AsyncClient() as client:
        asking = asyncio.create_task(client.post(f"{server.url}/v1/chat/completions", json=body, timeout=60))
        await asyncio.to_thread(wait_for_state, server.url, lambda state: bool(state["running"]))
        asking.cancel()
        await asyncio.wait([asking])
    state = await asyncio.to_thread(wait_for_state, server.url, lambda state: not state["running"])
    assert state["totals"]["num_aborted"] == before + 1


def test_state_health_and_live_page_say_how_the_model_is_run(server: ServerProcess) -> None:
    engine = read_state(server.url)["engine"]
    facts = {"device", "kernels", "dtype", "kv_dtype", "threads", "attention", "tensor_parallel_size"}
    assert set(engine) == facts
    assert httpx.get(f"{server.url}/health").json()["engine"] == engine
    page = httpx.get(f"{server.url}/live").text
    assert f'<b id="stat-dtype">{engine["dtype"]}</b>' in page
    info = EngineInfo(**engine)
    assert f"{info.means} · KV {info.kv_dtype} · {info.place}" in page
    assert f"{engine['dtype']} weights, {engine['kv_dtype']} KV cache, " in server.output
