"""A client of the OpenAI API that costs next to nothing: it shares the cores with the server it measures.

`run_load` sends the requests of a run over HTTP/1.1, streamed, and returns their figures. As a program
(`python -m bench.http_client`, a job as JSON on standard input, figures as JSON on standard output) it is a
client in a process of its own. Imports nothing but the standard library.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

from bench.common import ROOT, Figures
from bench.timing import Answer, figures_of
from bench.workload import Prompt

_LINE_LIMIT = 2**20
_TIMEOUT_S = 1200


@dataclass(frozen=True)
class LoadJob:
    """What to send where. `arrivals_s` (seconds from the start) is None when all are due at once.

    `extra` goes into each body, beside what the OpenAI API and `ignore_eos` say.
    """

    url: str
    case: str
    prompts: list[Prompt]
    arrivals_s: list[float] | None = None
    model: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


def run_load(job: LoadJob) -> Figures:
    """Send all requests from this process and return the figures."""
    return asyncio.run(_run(job))


def run_load_apart(job: LoadJob) -> Figures:
    """Send all requests from a process of its own and return the figures."""
    process = subprocess.run(
        [sys.executable, "-m", "bench.http_client"],
        cwd=ROOT,
        input=json.dumps(asdict(job)),
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    figures: Figures = json.loads(process.stdout)
    return figures


async def _run(job: LoadJob) -> Figures:
    due_s: Sequence[float] = job.arrivals_s or [0.0] * len(job.prompts)
    bodies = [_encode(job, prompt) for prompt in job.prompts]
    started_s = time.perf_counter()
    async with asyncio.timeout(_TIMEOUT_S):
        answers = await asyncio.gather(
            *(_ask(job.url, body, Answer(started_s + due)) for body, due in zip(bodies, due_s, strict=False))
        )
    return figures_of(job.case, job.prompts, answers, started_s)


def _encode(job: LoadJob, prompt: Prompt) -> bytes:
    body = {
        "model": job.model,
        "prompt": prompt.token_ids,
        "max_tokens": prompt.num_new,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **job.extra,
    }
    return json.dumps(body, separators=(",", ":")).encode()


async def _ask(url: str, body: bytes, answer: Answer) -> Answer:
    """Send one request when it is due and note when the pieces of its answer come."""
    await asyncio.sleep(answer.due_s - time.perf_counter())
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=_LINE_LIMIT)
    try:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        async for line in _lines(reader):
            _take(line, answer)
    finally:
        writer.close()
    return answer


def _take(line: bytes, answer: Answer) -> None:
    if not line.startswith(b"data: {"):
        return
    now_s = time.perf_counter()
    event = json.loads(line[6:])
    if event.get("error"):
        raise RuntimeError(f"the server answers {event['error']}")
    if event.get("usage"):
        answer.num_new = event["usage"]["completion_tokens"]
    if event["choices"] and event["choices"][0].get("text"):
        answer.pieces_s.append(now_s)


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of the body of a response, chunked or to the end of the connection."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    status = head.split(b" ", 2)[1]
    if status != b"200":
        text = (await reader.read(_LINE_LIMIT)).decode(errors="replace")
        raise RuntimeError(f"the server answers {status.decode()}: {text[:500]}")
    rest = b""
    async for chunk in _chunks(reader, is_chunked=b"transfer-encoding: chunked" in head):
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line


async def _chunks(reader: asyncio.StreamReader, *, is_chunked: bool) -> AsyncIterator[bytes]:
    if not is_chunked:
        while chunk := await reader.read(_LINE_LIMIT):
            yield chunk
        return
    while size := int((await reader.readline()).split(b";")[0] or b"0", 16):
        yield (await reader.readexactly(size + 2))[:-2]


def main() -> None:
    """Read a job, run it, print the figures."""
    fields = json.loads(sys.stdin.read())
    fields["prompts"] = [Prompt(**prompt) for prompt in fields["prompts"]]
    print(json.dumps(run_load(LoadJob(**fields))))


if __name__ == "__main__":
    main()
