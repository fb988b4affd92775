"""Real servers whose model is computed by two processes: one that dies, one that freezes, and their ends."""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.api import read_events
from tests.support.ranks import find_ranks, is_running, listening_addresses
from tests.support.server import ServerProcess, run_forked
from tests.support.tiny_server import served_model, tiny_server, write_tiny_model

TIMEOUT_S = 30.0
FROZEN_S = 6.0
"""Stated in docs/parallel.md: a rank that does not answer is noticed within so many seconds."""

PATIENCE_S = 20.0
"""For whatever else runs on the machine of a test."""

LOOPBACK = "0100007F"
TWO_RANKS = ("--tensor-parallel-size", "2", "--threads", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


class Client:
    """Asks one server, and knows its ranks."""

    def __init__(self, server: ServerProcess, http: httpx.AsyncClient) -> None:
        self.server = server
        self.http = http

    @property
    def rank(self) -> int:
        (pid,) = find_ranks(self.server.process.pid)
        return pid

    async def ask(self, prompt: list[int], **fields: Any) -> httpx.Response:
        model = await served_model(self.http)
        body = {"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        return await self.http.post("/v1/completions", json={**body, **fields})

    async def answer(self) -> list[str]:
        """Return answers to the same questions, greedy and drawn."""
        responses = [
            await self.ask(list(range(10, 40))),
            await self.ask(list(range(50, 60)), temperature=1, seed=3),
        ]
        return [response.json()["choices"][0]["text"] for response in responses]

    async def is_ready(self) -> bool:
        return (await self.http.get("/health/ready")).status_code == httpx.codes.OK

    async def wait_for_readiness(self, *, is_wanted: bool, within_s: float = TIMEOUT_S) -> None:
        deadline_s = time.monotonic() + within_s
        while await self.is_ready() is not is_wanted:
            assert time.monotonic() < deadline_s, self.server.output
            await asyncio.sleep(0.02)


@asynccontextmanager
async def serve(model: Path, folder: Path, *arguments: str) -> AsyncIterator[Client]:
    await asyncio.to_thread(folder.mkdir)
    env = {"TMPDIR": str(folder), "OMP_WAIT_POLICY": "PASSIVE"}
    server = tiny_server(model, folder / "data", "--kernels", "torch", *arguments, env=env)
    try:
        await asyncio.to_thread(server.__enter__)
        async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as http:
            yield Client(server, http)
    finally:
        await asyncio.to_thread(server.__exit__, None, None, None)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.02)


async def lose_in_a_step(client: Client, signal_number: int, within_s: float) -> None:
    """Lose the rank while it computes: open requests are told so in time, and later ones are answered."""
    lost = client.rank
    streams = [asyncio.create_task(client.ask([7, 8, 9 + i], max_tokens=240, stream=True)) for i in range(3)]
    await until_running(client, len(streams))
    os.kill(lost, signal_number)
    await client.wait_for_readiness(is_wanted=False, within_s=within_s + PATIENCE_S)
    for stream in streams:
        assert read_events((await stream).text)[-1]["error"]["code"] == "engine_error"
    await client.wait_for_readiness(is_wanted=True)
    assert not is_running(lost)


async def until_running(client: Client, count: int) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        state = (await client.http.get("/api/engine/state?blocks=0")).json()
        running, waiting = state["running"], state["waiting"]  # preempted ones wait
        if len(running) + len(waiting) == count and any(view["num_tokens"] > 8 for view in running):
            return
        assert time.monotonic() < deadline_s, state
        await asyncio.sleep(0.02)


async def lose_while_idle(client: Client, signal_number: int, within_s: float) -> None:
    """Lose the rank while nobody asks for anything: noticed all the same, and in time."""
    lost = client.rank
    os.kill(lost, signal_number)
    await client.wait_for_readiness(is_wanted=False, within_s=within_s + PATIENCE_S)
    assert (await client.http.get("/health/live")).status_code == httpx.codes.OK
    await client.wait_for_readiness(is_wanted=True)
    assert not is_running(lost)


async def live_through(client: Client, expected: list[str], signals: tuple[int, int]) -> None:
    """Lose the rank twice, in a step and while idle; the answers stay the same."""
    assert await client.answer() == expected
    within_s = {signal.SIGKILL: 1.0, signal.SIGSTOP: FROZEN_S}
    in_a_step, while_idle = (signal.Signals(number) for number in signals)
    await lose_in_a_step(client, in_a_step, within_s[in_a_step])
    assert await client.answer() == expected
    await lose_while_idle(client, while_idle, within_s[while_idle])
    assert await client.answer() == expected


@pytest.mark.slow
async def test_two_servers_side_by_side_live_through_dead_and_frozen_ranks(
    model: Path, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        async with asyncio.TaskGroup() as group:
            starts = [
                group.create_task(stack.enter_async_context(serve(model, tmp_path / name, *arguments)))
                for name, arguments in (("alone", ()), ("a", TWO_RANKS), ("b", TWO_RANKS))
            ]
        alone, a, b = (start.result() for start in starts)
        expected = await alone.answer()
        assert find_ranks(alone.server.process.pid) == []
        first_ranks = [a.rank, b.rank]
        for client in (a, b):
            assert listening_addresses(client.rank) == {LOOPBACK}
            assert listening_addresses(client.server.process.pid) == {LOOPBACK}
        await asyncio.gather(
            live_through(a, expected, (signal.SIGKILL, signal.SIGSTOP)),
            live_through(b, expected, (signal.SIGSTOP, signal.SIGKILL)),
        )
        last_ranks = [a.rank, b.rank]
        assert not set(first_ranks) & set(last_ranks)
        for client in (a, b):
            for words in ("was ended by SIGKILL", "no sign of life for 5 s", "rank 1 engine.parallel.worker"):
                assert words in client.server.output

        # One ends as asked, the other has no time to do anything.
        assert await asyncio.to_thread(a.server.stop, signal.SIGTERM) == 0, a.server.output
        assert not is_running(last_ranks[0])
        b.server.process.kill()
        await until(lambda: not is_running(last_ranks[1]))
        for name in "ab":
            assert {entry.name for entry in (tmp_path / name).iterdir()} == {"data"}


def test_more_ranks_than_the_model_can_be_cut_into_are_refused_in_one_line(model: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ended = run_forked(
            *("serve", "--model", str(model), "--port", "0", "--data-dir", folder),
            *("--tensor-parallel-size", "3"),
        )
    assert ended.returncode == 2
    (line,) = ended.stderr.strip().splitlines()
    assert line == (
        "pageglass: tensor_parallel_size is 3, but the model has 2 key/value heads to share out; "
        "use a smaller one."
    )
