"""The load generator against a small HTTP server of the test's own."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from app.load.client import LoadClient, Outcome
from app.load.files import LoadError

OK_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


class Stub:
    """Answers every request with prepared bytes and keeps what it was sent."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.requests: list[tuple[str, str, bytes]] = []
        self.url = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(
            (
                int(line.split(":")[1])
                for line in head.split("\r\n")
                if line.lower().startswith("content-length")
            ),
            0,
        )
        body = await reader.readexactly(length)
        self.requests.append((head.split(" ")[1], head, body))
        writer.write(self.answer)
        await writer.drain()
        writer.close()


@asynccontextmanager
async def serving(answer: bytes) -> AsyncIterator[Stub]:
    stub = Stub(answer)
    server = await asyncio.start_server(stub.handle, "127.0.0.1", 0)
    stub.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield stub


def events(*items: object, done: bool = True) -> bytes:
    lines = [f"data: {json.dumps(item)}\n\n" for item in items]
    return OK_HEAD + "".join([": heartbeat\n\n", *lines, *(["data: [DONE]\n\n"] if done else [])]).encode()


def completion(text: str) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": text}]}


def usage(num_tokens: int) -> dict[str, object]:
    return {"choices": [], "usage": {"completion_tokens": num_tokens}}


def plain(status: str, body: object) -> bytes:
    data = json.dumps(body).encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data


async def send_to(answer: bytes) -> tuple[Outcome, int, Stub]:
    num_pieces = 0

    def on_piece() -> None:
        nonlocal num_pieces
        num_pieces += 1

    async with serving(answer) as stub, LoadClient(stub.url, concurrency=1, api_key="k") as client:
        outcome = await client.send("/v1/completions", {"prompt": [1, 2]}, on_piece)
    return outcome, num_pieces, stub


async def test_stream_is_read_with_times_and_usage() -> None:
    outcome, num_pieces, stub = await send_to(
        events(completion("a"), completion("b"), completion(""), usage(5))
    )

    assert (outcome.error, outcome.text, outcome.num_output_tokens, num_pieces) == (None, "ab", 5, 2)
    assert outcome.ttft_s is not None
    assert len(outcome.gaps_s) == 1
    path, head, body = stub.requests[0]
    assert path == "/v1/completions"
    assert "Authorization: Bearer k" in head
    assert json.loads(body) == {"prompt": [1, 2], "stream": True, "stream_options": {"include_usage": True}}


async def test_chat_chunks_are_understood() -> None:
    chunks = [{"choices": [{"delta": delta}]} for delta in ({"role": "assistant"}, {"content": "hi"}, {})]

    outcome, num_pieces, _ = await send_to(events(*chunks, usage(1)))

    assert (outcome.error, outcome.text, num_pieces) == (None, "hi", 1)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (events(completion("a"), done=False), "stream cut short"),
        (events(completion("a"), {"error": {"code": "engine_dead"}}), "engine_dead"),
        (plain("503 Service Unavailable", {"error": {"type": "overloaded", "code": None}}), "503 overloaded"),
        (plain("500 Internal Server Error", "oops"), "500 Internal Server Error"),
        (OK_HEAD + b"data: {broken\n\n", "answer not in the OpenAI format"),
        (events({"choices": [{}]}), "answer not in the OpenAI format"),
        (b"", "connection lost"),
    ],
)
async def test_failures_are_named_in_a_few_words(answer: bytes, error: str) -> None:
    outcome, _, _ = await send_to(answer)

    assert outcome.error == error
    assert not outcome.is_over_context


async def test_prompt_over_the_context_is_recognised() -> None:
    outcome, _, _ = await send_to(plain("400 Bad Request", {"error": {"code": "context_length_exceeded"}}))

    assert outcome.is_over_context


async def test_first_model_is_used_unless_one_is_named() -> None:
    models = {"data": [{"id": "a", "max_model_len": 9, "vocab_size": 5}, {"id": "b"}]}
    async with (
        serving(plain("200 OK", models)) as stub,
        LoadClient(f"{stub.url}/v1/", concurrency=1) as client,
    ):
        first, named = await client.server_info(None), await client.server_info("b")
        with pytest.raises(LoadError, match=r"The server has no model c \(it has: a, b\)\."):
            await client.server_info("c")

    assert (first.model, first.max_model_len, first.vocab_size) == ("a", 9, 5)
    assert (named.model, named.max_model_len, named.vocab_size) == ("b", None, None)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (plain("503 Service Unavailable", {"error": {"code": "loading"}}), "/v1/models answers 503 loading"),
        (plain("200 OK", {"data": []}), "it may still be loading"),
        (plain("200 OK", ["x"]), "does not answer in the OpenAI format"),
        (plain("200 OK", {"models": []}), "does not answer in the OpenAI format"),
        (b"", "connection lost"),
    ],
)
async def test_server_without_models_is_an_error_of_one_line(answer: bytes, message: str) -> None:
    async with serving(answer) as stub, LoadClient(stub.url, concurrency=1) as client:
        with pytest.raises(LoadError, match=message):
            await client.server_info(None)


async def test_unreachable_server_is_an_error_of_one_line() -> None:
    async with LoadClient("http://127.0.0.1:9", concurrency=1) as client:
        with pytest.raises(LoadError, match=r"No answer from http://127.0.0.1:9: no connection\."):
            await client.server_info(None)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "", "http://"])
def test_url_must_be_http(url: str) -> None:
    with pytest.raises(LoadError, match="is not a URL"):
        LoadClient(url, concurrency=1)


@pytest.mark.parametrize(
    ("answer", "names"),
    [
        (plain("200 OK", {"priority_classes": {"quick": -1, "slow": 1}}), ["quick", "slow"]),
        (plain("404 Not Found", {"detail": "no such path"}), None),
        (plain("200 OK", {"models": []}), None),
        (plain("200 OK", {"priority_classes": 5}), None),
        (plain("200 OK", "hello"), None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\n<a>", None),
        (b"", None),
    ],
)
async def test_names_of_priorities_come_from_servers_that_have_them(
    answer: bytes, names: list[str] | None
) -> None:
    async with serving(answer) as stub, LoadClient(stub.url, concurrency=1) as client:
        assert await client.priority_classes() == names
