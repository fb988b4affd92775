import asyncio
import json

import pytest

from bench.http_client import LoadJob, run_load
from bench.workload import Prompt

pytestmark = pytest.mark.unit

EVENTS = [
    {"choices": [{"text": "a"}], "usage": None},
    {"choices": [{"text": ""}], "usage": None},
    {"choices": [{"text": "b"}], "usage": None},
    {"choices": [], "usage": {"completion_tokens": 2}},
]
STREAM = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in EVENTS) + b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def ask(answer: bytes) -> tuple[dict[str, float], list[bytes]]:
    """Send one request to a server that gives `answer`; return the figures and what it was sent."""
    bodies = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])
        bodies.append(await reader.readexactly(length))
        writer.write(answer)
        await writer.drain()
        writer.close()

    async def run() -> dict[str, float]:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            return await asyncio.to_thread(run_load, LoadJob(url, "W2", [Prompt([5, 6], 2)], model="m"))

    return asyncio.run(run()), bodies


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_chunked_stream_is_read_however_it_is_cut(size: int) -> None:
    figures, bodies = ask(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(STREAM, size))
    assert figures["output_tok_s"] > 0
    sent = json.loads(bodies[0])
    assert sent["prompt"] == [5, 6]
    assert (sent["max_tokens"], sent["model"], sent["stream"], sent["ignore_eos"]) == (2, "m", True, True)


def test_a_stream_that_ends_with_its_connection_is_read_too() -> None:
    figures, _ = ask(HEAD + b"\r\n" + STREAM)
    assert figures["seconds"] > 0


def test_a_refusal_is_reported_with_its_text() -> None:
    with pytest.raises(RuntimeError, match="429: slow down"):
        ask(b"HTTP/1.1 429 Too Many\r\n\r\nslow down")


def test_an_error_in_the_stream_is_reported() -> None:
    with pytest.raises(RuntimeError, match="engine_error"):
        ask(HEAD + b'\r\ndata: {"error": {"code": "engine_error"}}\n\n')
