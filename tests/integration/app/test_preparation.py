"""Between the first byte of a request and its admission: text work that takes long, and how it ends."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

import app.services.generation as generation_module
import app.web.openai_api
from app.services.generation import NUM_TEMPLATE_WORKERS, NUM_TEXT_WORKERS
from app.web.openai_requests import parse_completion
from tests.support.api import MODEL, ServedApi, served_api, until
from tests.support.fake_engine import FakeEngine, LetterTokenizer


class HeldTokenizer(LetterTokenizer):
    """Rendering a chat with "stuck" in it and encoding a text with "slow" in it wait for `gate`."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.num_held = 0

    def _hold(self) -> None:
        self.num_held += 1
        self.gate.wait(20)

    def render_chat(self, messages: list[dict[str, str]]) -> list[str]:
        if "stuck" in messages[0]["content"]:
            self._hold()
        return super().render_chat(messages)

    def encode(self, text: str) -> list[int]:
        if "slow" in text:
            self._hold()
        return super().encode(text)


class Held:
    """A served API whose tokenizer can be held up."""

    def __init__(self, api: ServedApi, tokenizer: HeldTokenizer) -> None:
        self.api = api
        self.tokenizer = tokenizer
        self.host = api.plugin.host

    def chat(self, content: str) -> asyncio.Task[httpx.Response]:
        body = self.api.chat_body(content, max_tokens=2)
        return asyncio.create_task(self.api.client.post("/v1/chat/completions", json=body))

    def complete(self, prompt: str) -> asyncio.Task[httpx.Response]:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
        return asyncio.create_task(self.api.client.post("/v1/completions", json=body))

    async def begin(self, content: bytes, path: str = "/v1/completions") -> Any:
        """Send headers for `content`, but only its first bytes, over a connection of its own."""
        reader, writer = await asyncio.open_connection(*self.api.address)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
        writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + content[:1])
        return reader, writer


@pytest.fixture
async def held() -> AsyncIterator[Held]:
    tokenizer = HeldTokenizer()
    async with served_api(FakeEngine(), shutdown_timeout=0.5) as api:
        api.plugin.host.tokenizer = tokenizer  # type: ignore[assignment]
        yield Held(api, tokenizer)
        api.server.should_exit = True
        # The server ends with the threads still held.
        await until(lambda: not api.plugin.host.has_thread)
    tokenizer.gate.set()


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    return error


async def test_templates_that_never_end_cost_chats_but_no_completions(
    held: Held, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(generation_module, "TEMPLATE_DEADLINE_S", 0.1)
    stuck = [held.chat("stuck") for _ in range(NUM_TEMPLATE_WORKERS + 3)]
    for response in await asyncio.gather(*stuck):
        error = error_of(response)
        assert (response.status_code, error["code"], error["param"]) == (
            400,
            "chat_template_error",
            "messages",
        )
    assert held.tokenizer.num_held == NUM_TEMPLATE_WORKERS
    assert "does not end" in error_of(await held.chat("hello"))["message"]
    assert "threads are stuck" in caplog.text
    assert (await held.complete("hello")).status_code == 200
    assert held.host.num_open == 0


async def test_a_text_that_can_never_fit_is_refused_before_it_is_tokenised(held: Held) -> None:
    for response in (await held.complete("slow" * 1000), await held.chat("slow" * 1000)):
        error = error_of(response)
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert "at least 40" in error["message"]
    assert held.tokenizer.num_held == 0


async def test_too_many_token_ids_are_refused_before_they_are_looked_at(held: Held) -> None:
    response = await held.api.client.post("/v1/completions", json={"model": MODEL, "prompt": [1] * 30_000})
    assert error_of(response)["code"] == "context_length_exceeded"
    assert "30000" in error_of(response)["message"]


async def test_more_text_work_than_may_wait_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_module, "MAX_WAITING_CALLS", 1)
    async with served_api(FakeEngine()) as api:
        tokenizer = HeldTokenizer()
        api.plugin.host.tokenizer = tokenizer  # type: ignore[assignment]
        held = Held(api, tokenizer)
        taken = [held.complete("slow") for _ in range(NUM_TEXT_WORKERS + 1)]
        await until(lambda: tokenizer.num_held == NUM_TEXT_WORKERS and held.host.num_open == len(taken))
        response = await held.complete("one more")
        assert (response.status_code, error_of(response)["code"]) == (429, "queue_full")
        assert int(response.headers["retry-after"]) >= 1
        tokenizer.gate.set()
        assert {response.status_code for response in await asyncio.gather(*taken)} == {200}


async def test_a_client_that_leaves_during_tokenisation_is_never_admitted(held: Held) -> None:
    body = json.dumps({"model": MODEL, "prompt": "slow", "max_tokens": 2}).encode()
    _, writer = await held.begin(body)
    writer.write(body[1:])
    await until(lambda: held.tokenizer.num_held == 1)
    assert held.host.num_open == 1
    writer.close()
    await until(lambda: held.host.num_open == 0)
    held.tokenizer.gate.set()
    assert (await held.complete("next")).status_code == 200
    snapshot = held.api.plugin.hub.snapshot
    assert snapshot is not None
    assert (snapshot.totals.num_aborted, snapshot.totals.num_finished) == (0, 1)


async def test_requests_that_are_not_admitted_yet_are_told_when_the_server_stops(
    held: Held, caplog: pytest.LogCaptureFixture
) -> None:
    sending = [
        await held.begin(b"{}" + b" " * 500, path) for path in ("/v1/completions", "/v1/chat/completions")
    ]
    preparing = [held.complete("slow"), held.chat("stuck")]
    await until(lambda: held.tokenizer.num_held == 2 and held.host.num_open == 4)
    held.api.server.should_exit = True
    for response in await asyncio.gather(*preparing):
        assert (response.status_code, error_of(response)["code"]) == (503, "server_shutdown")
        assert response.headers["retry-after"]
    for reader, writer in sending:
        answer = await reader.read()
        writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert json.loads(body)["error"]["code"] == "server_shutdown"
    assert "Traceback" not in caplog.text


async def test_a_large_body_is_parsed_off_the_event_loop(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def parse(raw: bytes) -> Any:
        threads.append(threading.current_thread().name)
        return parse_completion(raw)

    monkeypatch.setattr(app.web.openai_api, "parse_completion", parse)
    assert (await held.complete("small")).status_code == 200
    await held.complete("large" * 20_000)
    assert threads == ["MainThread", "pageglass-text"]
