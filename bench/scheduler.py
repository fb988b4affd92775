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
from engine.records import FreeCause, Preempted
from engine.sampling_params import SamplingParams
from engine.sequence import EngineRequest

POOL_SIZES = (1_000, 10_000, 100_000, 1_000_000)
OPERATIONS = 20_000
MAX_WARM_UP_STEPS = 1_000


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.scheduler", description=__doc__)
    parser.add_argument("--running", type=int, default=256, help="running sequences (default 256)")
    parser.add_argument("--waiting", type=int, default=1000, help="waiting sequences (default 1000)")
    parser.add_argument("--blocks", type=int, default=100_000, help="blocks in the pool (default 100000)")
    parser.add_argument("--steps", type=int, default=400, help="steps measured in each case (default 400)")
    options = parser.parse_args()
    print(versions())
    print(f"before: {yardstick()}")
    rows = [
        row
        for policy in ("fcfs", "priority")
        for pressure, num_host_blocks in (("roomy", 0), ("full", 0), ("full", options.blocks // 5))
        for row in _schedule_us(options, policy, pressure, num_host_blocks)
    ]
    print_table(
        [
            f"about {options.running} running, {options.waiting} waiting, {options.blocks:,} blocks",
            "median µs",
            "p99 µs",
            "steps",
        ],
        rows,
    )
    print()
    print_table(["blocks in the pool", "ns for allocate, publish, find, free"], _block_ns())
    print(f"after: {yardstick()}")


def _schedule_us(
    options: argparse.Namespace, policy: str, pressure: str, num_host_blocks: int
) -> list[list[object]]:
    """Time the decision of steps while many wait, those that preempt apart.

    roomy: all slots are taken, blocks are plenty. full: the pool just holds the running sequences' prompts,
    so they preempt each other as they grow.
    """
    prompt_tokens = 64 if pressure == "roomy" else 16 * options.blocks // options.running - 64
    core = _make_core(options, policy, prompt_tokens, num_host_blocks)
    running = core.scheduler.state.running
    for _ in range(MAX_WARM_UP_STEPS):
        core.step()
        is_loaded = len(running) >= options.running * 0.9
        if is_loaded and all(sequence.num_computed_tokens >= prompt_tokens for sequence in running):
            break
    plain: list[float] = []
    preempting: list[float] = []
    for _ in range(options.steps):
        record = core.step().record
        preempts = any(isinstance(event, Preempted) for event in record.events)
        (preempting if preempts else plain).append(record.schedule_ns / 1e3)
    tier = f", host tier of {num_host_blocks:,}" if num_host_blocks else ""
    return [
        [f"{policy}, {name}{tier}", statistics.median(times), percentile(times, 99), len(times)]
        for name, times in ((pressure, plain), (f"{pressure}, preempting", preempting))
        if times
    ]


def _make_core(
    options: argparse.Namespace, policy: str, prompt_tokens: int, num_host_blocks: int
) -> EngineCore:
    config = EngineConfig(
        num_blocks=options.blocks,
        max_num_seqs=options.running,
        max_num_batched_tokens=max(16_384, 16 * options.running),
        max_model_len=prompt_tokens + 4096,
        max_waiting=options.waiting + options.running,
        policy=policy,
        num_host_blocks=num_host_blocks,
    )
    core = EngineCore(config, InstantRunner())
    for index in range(options.running + options.waiting):
        core.add_request(
            EngineRequest(
                request_id=f"r{index}",
                prompt_token_ids=[index % 1000, index // 1000, *([index % 7] * (prompt_tokens - 2))],
                sampling_params=SamplingParams(max_tokens=4096, ignore_eos=True),
                priority=index % 3 * 10,
            )
        )
    return core


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
