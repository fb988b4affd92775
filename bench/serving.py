"""The server under load: `python -m bench.serving [--streams 64] [-- serve options]`.

Opens many chat streams at once and meanwhile asks `/health/live` over and over; prints how long the
answers took (the event loop's health), the throughput, and the engine's own account of its steps.
"""

import argparse
import asyncio
import json
import tempfile
import time

import httpx

from bench.common import percentile, print_table, versions, yardstick
from bench.server import start_server, stop_server

HEALTH_INTERVAL_S = 0.02
READY_TIMEOUT_S = 120
STREAM_TIMEOUT_S = 600


async def _stream(client: httpx.AsyncClient, index: int, max_tokens: int, first_s: list[float]) -> int:
    """Run one stream; return the number of content chunks."""
    body = {
        "model": "",
        "messages": [{"role": "user", "content": f"Write {index + 3} sentences about the number {index}."}],
        "stream": True,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    models = (await client.get("/v1/models")).json()
    body["model"] = models["data"][0]["id"]
    started, num_chunks = time.perf_counter(), 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line[6:])["choices"]
                if choices and choices[0]["delta"].get("content"):  # not the chunk that names the role
                    if num_chunks == 0:
                        first_s.append(time.perf_counter() - started)
                    num_chunks += 1
    return num_chunks


async def _watch_health(client: httpx.AsyncClient, latencies_ms: list[float]) -> None:
    while True:
        started = time.perf_counter()
        (await client.get("/health/live")).raise_for_status()
        latencies_ms.append((time.perf_counter() - started) * 1e3)
        await asyncio.sleep(HEALTH_INTERVAL_S)


async def _measure(url: str, streams: int, max_tokens: int) -> None:
    limits = httpx.Limits(max_connections=streams + 8)
    async with (
        httpx.AsyncClient(base_url=url, timeout=STREAM_TIMEOUT_S, limits=limits) as client,
        httpx.AsyncClient(base_url=url, timeout=30) as health_client,
    ):
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not (await health_client.get("/health/ready")).is_success:
            if time.monotonic() > deadline:
                raise SystemExit("the server did not become ready")
            await asyncio.sleep(0.1)
        latencies_ms: list[float] = []
        first_s: list[float] = []
        watcher = asyncio.create_task(_watch_health(health_client, latencies_ms))
        started = time.perf_counter()
        await asyncio.gather(*(_stream(client, index, max_tokens, first_s) for index in range(streams)))
        elapsed_s = time.perf_counter() - started
        watcher.cancel()
        state = (await health_client.get("/api/engine/state", params={"blocks": 0})).json()
    totals = state["totals"]
    print_table(
        [f"{streams} streams of {max_tokens} tokens", "value"],
        [
            ["output tok/s", totals["num_output_tokens"] / elapsed_s],
            ["first token p50 s", percentile(first_s, 50)],
            ["first token p99 s", percentile(first_s, 99)],
            [f"/health/live p50 ms ({len(latencies_ms)} asked)", percentile(latencies_ms, 50)],
            ["/health/live p99 ms", percentile(latencies_ms, 99)],
            ["/health/live max ms", max(latencies_ms)],
            ["steps", state["step"]],
            ["last full step: host ms", state["batch"]["host_ms"]],
            ["preemptions", totals["num_preemptions"]],
        ],
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    options, serve_args = parser.parse_known_args()
    print(versions())
    print(yardstick())
    with tempfile.TemporaryDirectory() as data_dir:
        process, url = start_server(data_dir, [arg for arg in serve_args if arg != "--"])
        try:
            while True:
                try:
                    httpx.get(url + "/health/live")
                    break
                except httpx.TransportError:
                    time.sleep(0.05)
            asyncio.run(_measure(url, options.streams, options.max_tokens))
        finally:
            stop_server(process)
    print(yardstick())


if __name__ == "__main__":
    main()
