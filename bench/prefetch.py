"""What a host tier and looking ahead save: `python -m bench.prefetch`.

Runs requests at once through our engine, in this process, in a KV pool that is too small for them, and then
each again as the next turn of a conversation would be: the same prompt and some tokens more. In turn in
several ways:

  recompute          preempted requests are computed again; no host tier
  swap               preempted requests wait in the host tier
  swap, offload      and evicted prefixes go there, too
  ..., no lookahead  the same without reserving blocks a step ahead

and prints for each way, as medians of all runs:

  tok/s              output tokens per second, over both rounds
  computed again     tokens whose KV had been there, and was thrown away by a preemption
  from the tier      tokens that were not computed since the host tier had them
  loads, hidden      copies back for one request each; those that were copied while others computed
  would have waited  steps that computed while a load was under way: they would have stood still for it if
                     copies were made when they are needed
  waited             steps that computed nothing but waited for a load, and steps that had to wait until a
                     block had been read before they could write it
  ahead, used        blocks reserved a step ahead of need; those that their request came to use
  spared             steps in which no block had to be found for decoding, since it was reserved before
  outside ms         milliseconds of a step outside the model, on average

Blocks are reserved ahead only while blank ones are plenty: --kv-memory 600MiB shows more of that, and no
pressure. The figures of one sitting are comparable, no others. --requests cuts the case down to try something
out.
"""

import argparse
import statistics
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec

from app.setting_values import parse_size
from bench.common import (
    Activity,
    Figures,
    medians,
    print_disturbed,
    print_table,
    versions,
    wait_for_quiet,
    write_json,
    yardstick,
)
from bench.own_engine import Steps, add_engine_options, drive, engine_options, make_load_request
from bench.timing import throughput
from bench.workload import Prompt, add_run_options, load_workload
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.loading import load_engine
from engine.records import Admitted, BlockOpKind, FreeCause, Loaded, StepRecord
from engine.runner.native_runner import NativeRunner
from engine.runner.torch_runner import TorchRunner
from engine.snapshot import EngineSnapshot

WAYS: dict[str, dict[str, Any]] = {
    "recompute": {"preemption_mode": "recompute", "num_host_blocks": 0},
    "recompute, no lookahead": {"preemption_mode": "recompute", "num_host_blocks": 0, "lookahead": False},
    "swap": {"preemption_mode": "swap", "offload": False},
    "swap, offload": {"preemption_mode": "swap"},
    "swap, offload, no lookahead": {"preemption_mode": "swap", "lookahead": False},
}
COLUMNS = {
    "tok/s": "output_tok_s",
    "computed again": "recomputed_tokens",
    "from the tier": "host_tokens",
    "loads": "loads",
    "hidden": "loads_hidden",
    "would have waited": "steps_beside_loads",
    "waited": "steps_waited",
    "ahead": "lookahead_blocks",
    "used": "lookahead_used",
    "spared": "steps_spared",
    "outside ms": "outside_model_ms",
}
NEXT_TURN_TOKENS = 32
POOL = "96MiB"
TIER = "600MiB"


def main() -> None:
    """Measure and print."""
    options = _parse()
    workload = load_workload(options.workload)
    wait_for_quiet(options.quiet_wait)
    before = yardstick(options.threads)
    request = make_load_request(engine_options(options))
    loaded = load_engine(replace(request, swap_memory_bytes=parse_size(options.swap_memory)), lambda _: None)
    runner, config = loaded.core.runner, loaded.core.config
    assert isinstance(runner, NativeRunner | TorchRunner)
    print(versions())
    print(before)
    print(f"{loaded.info}; {config.num_blocks} blocks, {config.num_host_blocks} in the host tier")
    print(
        f"a token of a prompt takes {config.recompute_ns_per_token / 1e3:.0f} µs, "
        f"copying a block of {config.block_size} takes {config.swap_ns_per_block / 1e3:.0f} µs"
    )
    drive(EngineCore(config, runner), workload.warm_up())
    results: dict[str, list[Figures]] = {way: [] for way in WAYS}
    for run in range(options.runs):
        prompts = workload.prompts("W2", run, options.requests)
        for way, changes in WAYS.items():
            wait_for_quiet(options.quiet_wait)
            activity = Activity()
            figures = run_way(runner, msgspec.structs.replace(config, **changes), prompts)
            results[way].append({**figures, **activity.others()})
    _report(results)
    wait_for_quiet(options.quiet_wait)
    after = yardstick(options.threads)
    print(after)
    write_json(options.json, {"engine": str(loaded.info), "yardstick": [before, after], "runs": results})


def run_way(runner: NativeRunner | TorchRunner, config: EngineConfig, prompts: list[Prompt]) -> Figures:
    """Run both rounds on an engine of their own; return the figures."""
    core, num_waits = EngineCore(config, runner), runner.copier.num_waits
    steps = Steps([], [])
    started_s = time.perf_counter()
    next_turns = [replace(p, token_ids=p.token_ids + p.token_ids[:NEXT_TURN_TOKENS]) for p in prompts]
    for round_ in (prompts, next_turns):
        _, taken = drive(core, round_)
        steps.records += taken.records
        steps.wall_ns += taken.wall_ns
    seconds = time.perf_counter() - started_s
    outside_ns = [
        wall_ns - record.forward_ns - record.sample_ns
        for record, wall_ns in zip(steps.records, steps.wall_ns, strict=True)
    ]
    counts = count_steps(steps.records)
    counts["steps_waited"] += runner.copier.num_waits - num_waits
    return {
        **throughput([*prompts, *next_turns], seconds),
        **_totals(config, steps.records),
        **{name: float(count) for name, count in counts.items()},
        "outside_model_ms": statistics.mean(outside_ns) / 1e6,
    }


def count_steps(records: list[StepRecord]) -> Counter[str]:
    """Count the steps that computed beside loads, waited for one, or found their blocks reserved."""
    counts = Counter({"steps_beside_loads": 0, "steps_waited": 0, "steps_spared": 0})
    num_loading = 0
    for record, following in zip(records, [*records[1:], None], strict=True):
        num_loading += sum(
            isinstance(event, Admitted) and event.num_host_tokens > 0 for event in record.events
        )
        if num_loading:
            counts["steps_beside_loads" if record.batch else "steps_waited"] += 1
        num_loading -= sum(isinstance(event, Loaded) for event in record.events)
        if following is not None:
            counts["steps_spared"] += _num_used_ahead(record, following) > 0
    return counts


def _num_used_ahead(record: StepRecord, following: StepRecord) -> int:
    """Return how many blocks that a step had reserved were not given back in the following one."""
    ahead = {op.block_id for op in record.block_ops if op.kind == BlockOpKind.LOOKAHEAD}
    unused = {
        op.block_id
        for one in (record, following)
        for op in one.block_ops
        if op.kind == BlockOpKind.FREE and op.arg == FreeCause.UNUSED_LOOKAHEAD
    }
    return len(ahead - unused)


def _totals(config: EngineConfig, records: list[StepRecord]) -> Figures:
    snapshot = EngineSnapshot(config)
    for record in records:
        snapshot.apply(record)
    totals = snapshot.totals
    return {
        "preemptions": float(totals.num_preemptions),
        "recomputed_tokens": float(totals.num_recomputed_tokens),
        "host_tokens": float(totals.num_host_tokens),
        "loads": float(totals.num_loads),
        "loads_hidden": float(totals.num_loads_hidden),
        "lookahead_blocks": float(totals.num_lookahead),
        "lookahead_used": float(totals.num_lookahead - totals.num_lookahead_unused),
    }


def _report(results: dict[str, list[Figures]]) -> None:
    rows: list[list[object]] = []
    for way, runs in results.items():
        figures = medians(runs)
        values = [figures[name] for name in COLUMNS.values()]
        rows.append([way, *(int(value) if value.is_integer() else value for value in values)])
    print_table([f"medians of {len(next(iter(results.values())))} runs", *COLUMNS], rows)
    for way, runs in results.items():
        print_disturbed(way, runs)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--swap-memory", default=TIER, help="host tier (default: %(default)s)")
    add_run_options(parser, runs=3)
    add_engine_options(parser)
    parser.set_defaults(kv_memory=POOL)
    return parser.parse_args()


if __name__ == "__main__":
    main()
