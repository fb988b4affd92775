"""What the scheduler costs: `python -m bench.scheduler`.

Decisions for many running and waiting sequences over a large pool, with a model that costs nothing; and what
one block operation takes in pools of a thousand to a million blocks.
"""

import argparse
import statistics
import time

from bench.common import percentile, print_table, versions, yardstick
from bench.recording import InstantRunner
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.kv.block_pool import BlockPool
from engine.records import FreeCause
from engine.sampling_params import SamplingParams
from engine.sequence import EngineRequest

POOL_SIZES = (1_000, 10_000, 100_000, 1_000_000)
OPERATIONS = 20_000


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.scheduler", description=__doc__)
    parser.add_argument("--running", type=int, default=256, help="running sequences (default 256)")
    parser.add_argument("--waiting", type=int, default=1000, help="waiting sequences (default 1000)")
    parser.add_argument("--blocks", type=int, default=100_000, help="blocks in the pool (default 100000)")
    parser.add_argument("--steps", type=int, default=400, help="steps measured in each row (default 400)")
    options = parser.parse_args()
    print(versions())
    print(f"before: {yardstick()}")
    rows = [
        [f"{policy}, {pressure}", *_schedule_us(options, policy, pressure)]
        for policy in ("fcfs", "priority")
        for pressure in ("decoding", "preempting")
    ]
    print_table(
        [
            f"{options.running} running, {options.waiting} waiting, {options.blocks:,} blocks",
            "median µs",
            "p99 µs",
            "preemptions a step",
        ],
        rows,
    )
    print()
    print_table(["blocks in the pool", "ns for allocate, publish, find, free"], _block_ns())
    print(f"after: {yardstick()}")


def _schedule_us(options: argparse.Namespace, policy: str, pressure: str) -> list[float]:
    """Time the decision of steps in which all slots are taken and many wait."""
    prompt_tokens = 64 if pressure == "decoding" else 16 * options.blocks // options.running - 64
    config = EngineConfig(
        num_blocks=options.blocks,
        max_num_seqs=options.running,
        max_num_batched_tokens=max(16_384, 16 * options.running),
        max_model_len=prompt_tokens + 4096,
        max_waiting=options.waiting + options.running,
        policy=policy,
    )
    core = EngineCore(config, InstantRunner())
    params = SamplingParams(max_tokens=4096, ignore_eos=True)
    for index in range(options.running + options.waiting):
        prompt = [index % 1000, index // 1000, *([index % 7] * (prompt_tokens - 2))]
        core.add_request(
            EngineRequest(
                request_id=f"r{index}",
                prompt_token_ids=prompt,
                sampling_params=params,
                priority=index % 3 * 10,
            )
        )
    while (
        any(s.num_computed_tokens < prompt_tokens for s in core.scheduler.state.running) or not core.has_work
    ):
        core.step()
        if len(core.scheduler.state.running) == options.running:
            break
    times, preemptions = [], 0
    for _ in range(options.steps):
        record = core.step().record
        times.append(record.schedule_ns / 1e3)
        preemptions += sum(type(event).__name__ == "Preempted" for event in record.events)
    return [statistics.median(times), percentile(times, 99), preemptions / options.steps]


def _block_ns() -> list[list[object]]:
    """Time the life of a block: allocated, published, found again, freed; per operation."""
    rows: list[list[object]] = []
    for num_blocks in POOL_SIZES:
        pool = BlockPool(num_blocks)
        count = min(OPERATIONS, num_blocks)
        times = []
        for repeat in range(5):
            names = [(repeat * count + index).to_bytes(32, "big") for index in range(count)]
            started = time.perf_counter_ns()
            for name in names:
                block_id = pool.allocate(0)
                pool.store_hash(block_id, 0, name, b"", name)
                pool.find(name, b"", name)
                pool.free([block_id], 0, FreeCause.FINISHED)
            times.append((time.perf_counter_ns() - started) / (4 * count))
            pool.ops.clear()
        rows.append([f"{num_blocks:,}", statistics.median(times)])
    return rows


if __name__ == "__main__":
    main()
