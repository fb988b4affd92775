"""Many chats at once on a real server, with a big and with a small cache: the same text as alone."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from app.model_store import DEFAULT_MODEL
from tests.support.reference import Messages, judge, load_oracle
from tests.support.server import ServerProcess
from tests.support.state import read_state

TASKS = (
    "Name a thing that has {}.",
    "What comes after {}?",
    "Write a line about {} birds.",
    "Who was born in 19{}?",
)
CHATS: list[Messages] = [
    [{"role": "user", "content": task.format(number)}] for number in range(10, 26) for task in TASKS
]
NUM_TOKENS = 8


async def chat(client: openai.AsyncOpenAI, messages: Messages) -> str:
    create: Any = client.chat.completions.create  # plain dicts are the API's own form, if not its types'
    stream = await create(
        model=DEFAULT_MODEL, messages=messages, temperature=0, max_tokens=NUM_TOKENS, stream=True
    )
    text, reasons = "", []
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        if chunk.choices[0].finish_reason:
            reasons.append(chunk.choices[0].finish_reason)
    assert len(reasons) == 1
    assert reasons[0] in {"stop", "length"}
    return text


async def chat_together(url: str) -> list[str]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        return list(await asyncio.gather(*(chat(client, messages) for messages in CHATS)))


async def chat_one_by_one(url: str) -> list[str]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        return [await chat(client, messages) for messages in CHATS]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(is_forked=True) as running:
        yield running


@pytest.fixture(scope="module")
def alone(server: ServerProcess) -> list[str]:
    return asyncio.run(chat_one_by_one(server.url))


def assert_same(texts: list[str], alone: list[str]) -> None:
    """Compare; a difference counts only where the reference model clearly prefers one token."""
    assert len(texts) == len(alone) == 64
    wrong = []
    for messages, text, expected in zip(CHATS, texts, alone, strict=True):
        if text != expected:
            found = judge(load_oracle(), messages, (text, expected))
            print(f"{messages[0]['content']!r}: {text!r} / {expected!r}, {found}")  # noqa: T201 - shown by pytest
            wrong += [found] if found.counts else []
    assert not wrong


@pytest.mark.slow
def test_64_chats_at_once_say_what_they_say_alone(server: ServerProcess, alone: list[str]) -> None:
    assert_same(asyncio.run(chat_together(server.url)), alone)
    state = read_state(server.url)
    assert state["totals"]["num_preemptions"] == 0
    assert state["counts"]["used"] == 0


@pytest.mark.slow
def test_64_chats_in_a_cache_too_small_for_them_say_what_they_say_alone(alone: list[str]) -> None:
    with ServerProcess("--num-blocks", "32", "--block-size", "8", is_forked=True) as small:
        assert_same(asyncio.run(chat_together(small.url)), alone)
        totals = read_state(small.url)["totals"]
        assert totals["num_preemptions"] > 0
        assert totals["num_hit_tokens"] > 0
        assert totals["num_finished"] == 64
        assert totals["num_aborted"] == totals["num_rejected"] == 0
