"""What the history costs: `python -m bench.history [--steps 16384]`.

Records a session of 64 sequences that decode all the time (a new request takes the place of each that ends),
with a model that costs nothing but whose times and tokens look like a real one's. Then: bytes a step in the
file, the cost of writing a step on the event loop, and how long a real server takes to show any step of it.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from sqlalchemy import func, select, text

from app.db.database import DATABASE_FILE, Database
from app.db.models import ChunkRow, KeyframeRow
from app.db.writer import HistoryWriter
from app.history.recorder import Recorder, TextSwitch
from app.history.step_log import CHUNK_STEPS, StepLog
from bench.common import percentile, print_table, versions, yardstick
from bench.server import start_server, stop_server
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.records import StepRecord
from engine.runner.base import LocalRunner, ModelRunnerOutput
from engine.sampling_params import SamplingParams
from engine.scheduling.output import SchedulerOutput
from engine.sequence import EngineRequest
from engine.snapshot import EngineSnapshot

NUM_SEQS = 64
PROMPT_TOKENS = 128
OUTPUT_TOKENS = 256
NUM_BLOCKS = 4096
VOCAB_SIZE = 49_152
SESSION = "bench"
PACED_STEPS = 2_000
PACE_S = 0.005
"""200 steps a second: more than any model here makes with 64 sequences."""

NUM_SEEKS = 200
READY_TIMEOUT_S = 60
STEPS_A_SECOND = (7, 50)


class RandomRunner(LocalRunner):
    """Answers at once; says that it took as long as a small model on two cores."""

    vocab_size = VOCAB_SIZE
    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        """Always the same run."""
        self.random = random.Random(1)

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Return a random token for each."""
        tokens = [self.random.randrange(VOCAB_SIZE) for _ in scheduler_output.scheduled]
        forward_ns = int(self.random.gauss(150e6, 5e6))
        return ModelRunnerOutput(tokens, forward_ns, self.random.randrange(1_000_000, 3_000_000))

    def reset(self) -> None:
        """Nothing to forget."""


def run_engine(config: EngineConfig) -> Iterator[StepRecord]:
    """Yield the records of an engine that is always full."""
    runner = RandomRunner()
    core = EngineCore(config, runner)
    number = 0
    while True:
        while len(core.scheduler.state.running) + len(core.scheduler.state.waiting) < NUM_SEQS:
            number += 1
            core.add_request(
                EngineRequest(
                    request_id=f"cmpl-{runner.random.getrandbits(96):024x}",
                    prompt_token_ids=[runner.random.randrange(VOCAB_SIZE) for _ in range(PROMPT_TOKENS)],
                    sampling_params=SamplingParams(
                        max_tokens=runner.random.randrange(OUTPUT_TOKENS // 2, OUTPUT_TOKENS), ignore_eos=True
                    ),
                )
            )
        yield core.step().record


async def record(database: Database, config: EngineConfig, records: list[StepRecord]) -> None:
    """Write a whole session as fast as it goes."""
    writer = HistoryWriter(database, flush_s=0)
    recorder = Recorder(SESSION, writer, TextSwitch(is_on=True))
    recorder.add_part(StepLog(SESSION, writer, recorder.text))
    recorder.start("bench", "0")
    recorder.open(config, "bench")
    writer.start()
    snapshot = EngineSnapshot(config)
    for item in records:
        snapshot.apply(item)
        recorder.on_record(item, snapshot)
        if item.step % CHUNK_STEPS == 0:
            await asyncio.sleep(0.1)  # the compaction of a run
            await writer.settle()
    recorder.close()
    await writer.stop(60)


async def measure_loop(folder: Path, config: EngineConfig, records: list[StepRecord], *, keep: bool) -> float:
    """Return the event loop's CPU time a step in µs, at a steady pace; `keep`: with the history."""
    writer = HistoryWriter(Database(folder / DATABASE_FILE))
    recorder = Recorder("paced", writer, TextSwitch(is_on=True))
    if keep:
        recorder.add_part(StepLog("paced", writer, recorder.text))
    recorder.start("bench", "0")
    recorder.open(config, "bench")
    writer.start()
    await writer.settle()
    snapshot = EngineSnapshot(config)
    started = time.thread_time()
    for item in records[:PACED_STEPS]:
        snapshot.apply(item)
        recorder.on_record(item, snapshot)
        await asyncio.sleep(PACE_S)
    await writer.settle()
    spent_s = time.thread_time() - started
    recorder.close()
    await writer.stop(60)
    return spent_s * 1e6 / PACED_STEPS


async def measure_sizes(database: Database, num_steps: int) -> None:
    """Print what the session takes."""
    await database.open()
    async with database.read() as db:
        chunks = (await db.scalar(select(func.sum(func.length(ChunkRow.records))))) or 0
        states = (await db.scalar(select(func.sum(func.length(KeyframeRow.state))))) or 0
        pages = (await db.scalar(text("SELECT page_count FROM pragma_page_count()"))) or 0
        free = (await db.scalar(text("SELECT freelist_count FROM pragma_freelist_count()"))) or 0
        page = (await db.scalar(text("SELECT page_size FROM pragma_page_size()"))) or 0
    await database.close()
    total = (pages - free) * page
    per_step = total / num_steps
    rows: list[list[object]] = [
        ["records", chunks / num_steps],
        ["states", states / num_steps],
        ["the whole file", per_step],
    ]
    print_table([f"{NUM_SEQS} sequences, {num_steps} steps", "bytes a step"], rows)
    hours = [[f"{rate} steps/s", per_step * rate * 3600 / 2**20] for rate in STEPS_A_SECOND]
    print_table(["a busy hour at", "MiB"], [list(row) for row in hours])


async def measure_seeks(url: str, num_steps: int) -> None:
    """Print how long a server takes to give any step, over HTTP."""
    rng = random.Random(2)
    chunks = list(range(1, num_steps + 1, CHUNK_STEPS))
    rng.shuffle(chunks)
    steps = [rng.randrange(1, num_steps + 1) for _ in range(NUM_SEEKS)]
    async with httpx.AsyncClient(base_url=f"{url}/api/sessions/{SESSION}", timeout=60) as client:
        await wait_for(client)
        frames = [await _time_ms(client, f"/chunks/{first}") for first in chunks]
        again = [await _time_ms(client, f"/chunks/{chunks[-1 - index % 8]}") for index in range(64)]
        states = [await _time_ms(client, f"/state?step={step}") for step in steps]
        size = len((await client.get(f"/chunks/{chunks[0]}")).content)
    rows: list[list[object]] = [
        [name, percentile(values, 50), percentile(values, 95), max(values)]
        for name, values in (
            (f"{len(chunks)} chunks, each the first time", frames),
            ("chunks that were asked for before", again),
            (f"the state after {NUM_SEEKS} random steps", states),
        )
    ]
    print_table(["over HTTP", "p50 ms", "p95 ms", "max ms"], rows)
    print(f"a chunk of frames: {size / 1024:.0f} KiB")


async def wait_for(client: httpx.AsyncClient) -> None:
    """Wait until the session can be read and the model is loaded: loading needs both cores."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while True:
        try:
            ready = await client.get(client.base_url.join("/health/ready"))
            if ready.is_success and json.loads((await client.get("")).content)["status"] != "running":
                return
        except httpx.TransportError:
            pass
        if time.monotonic() > deadline:
            raise SystemExit("the server did not become ready")
        await asyncio.sleep(0.1)


async def _time_ms(client: httpx.AsyncClient, path: str) -> float:
    started = time.perf_counter()
    (await client.get(path)).raise_for_status()
    return (time.perf_counter() - started) * 1e3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=16_384)
    num_steps = parser.parse_args().steps
    print(versions())
    print(yardstick())
    config = EngineConfig(num_blocks=NUM_BLOCKS, max_num_seqs=NUM_SEQS)
    records = [item for item, _ in zip(run_engine(config), range(num_steps), strict=False)]
    with tempfile.TemporaryDirectory() as folder:
        database = Database(Path(folder) / DATABASE_FILE)
        asyncio.run(record(database, config, records))
        asyncio.run(measure_sizes(database, num_steps))
        with tempfile.TemporaryDirectory() as other:
            costs = [
                asyncio.run(measure_loop(Path(other) / name, config, records, keep=keep))
                for name, keep in (("without", False), ("with", True))
            ]
        print_table(
            ["event loop, CPU a step", "µs"],
            [["folding and pacing alone", costs[0]], ["writing the history", costs[1] - costs[0]]],
        )
        process, url = start_server(folder, [])
        try:
            asyncio.run(measure_seeks(url, num_steps))
        finally:
            stop_server(process)
    print(yardstick())


if __name__ == "__main__":
    main()
