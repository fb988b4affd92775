"""How far W2 is from what the machine allows: `python -m bench.roofline --dtype q4`.

For each step of a run of W2 and each of its parts (a kind of linear layer over all layers, the output head,
attention) the floor is the larger of two times: of the part's bytes at the measured bandwidth of a copy, and
of its operations at the measured peak of the arithmetic that the linear layers use (q4 and int8: int8).
`bench.costs` says what is counted. The roofline is the sum of all floors, and the figure its share of the
whole run's time, with everything in it: 100 % would be a perfect overlap of memory and arithmetic and no
other work.

Prints the share, and for each part the floor, what it took and the ratio, all over the run. Beside it stands
what the machine's own limits would make of the part: reads come slower than the bytes of a copy, which are
read and written; attention computes in bfloat16; and in a product of int8 in groups of 32 the multipliers
also scale each group (`multiply.h`). The ceilings are measured between the runs, and a run is compared with
the mean of those before and after it.
"""

import argparse
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bench.common import (
    Activity,
    Figures,
    medians,
    print_figures,
    print_table,
    versions,
    wait_for_quiet,
    write_json,
    yardstick,
)
from bench.costs import ATTENTION, HEAD, PARTS, Cost, ModelCosts, Work
from bench.native import LoadedModel, describe
from bench.own_engine import add_engine_options, drive, engine_options
from bench.workload import Prompt, add_run_options, load_workload
from engine.kernels.cpu.library import PHASES, Ceilings
from engine.records import StepRecord

OUTSIDE = "outside the call"
_DOTS_OF_GROUP = 8
"""Dot products of 32 inputs and 16 outputs: one takes four inputs of each."""
_SCALINGS_OF_GROUP = {"q4": 2.5, "int8": 2.0}
"""Other multiplications of a group: two for its scales, with minima half a one for the zero point."""


@dataclass(frozen=True)
class Limits:
    """What the floors of a run are measured by."""

    gb_s: float
    gops: float


def floors_ns(
    costs: ModelCosts, records: Iterable[StepRecord], limits: Mapping[str, Limits]
) -> dict[str, float]:
    """Return the floor of each of `PARTS` in nanoseconds, summed over the steps; `limits` by part."""
    totals = dict.fromkeys(PARTS, 0.0)
    for record in records:
        batch = [
            Work(entry.num_computed_before, entry.num_scheduled, entry.token_id >= 0)
            for entry in record.batch
        ]
        if batch:
            for part, cost in costs.of_step(batch).items():
                totals[part] += _floor_ns(cost, limits[part])
    return totals


def _floor_ns(cost: Cost, limits: Limits) -> float:
    return cost.floor_ns(gb_s=limits.gb_s, gops=limits.gops)


def _limits(loaded: LoadedModel, before: Ceilings, after: Ceilings) -> Limits:
    return Limits(
        gb_s=(before.copy_gb_s + after.copy_gb_s) / 2,
        gops=(loaded.peak_gops(before) + loaded.peak_gops(after)) / 2,
    )


def own_limits(dtype: str, *, read_gb_s: float, gops: float, bf16_gflops: float) -> dict[str, Limits]:
    """Return what kernels like ours can reach, by part; `gops`: the peak of the arithmetic of `dtype`."""

    def of_product(kind: str) -> Limits:
        return Limits(read_gb_s, gops * _DOTS_OF_GROUP / (_DOTS_OF_GROUP + _SCALINGS_OF_GROUP.get(kind, 0.0)))

    limits = dict.fromkeys(PARTS, of_product(dtype))
    limits[HEAD] = of_product("int8" if dtype == "q4" else dtype)  # as such files have it
    limits[ATTENTION] = Limits(read_gb_s, bf16_gflops)
    return limits


def _own_limits(loaded: LoadedModel, before: Ceilings, after: Ceilings) -> dict[str, Limits]:
    return own_limits(
        loaded.model.sizes.dtype,
        read_gb_s=(before.read_gb_s + after.read_gb_s) / 2,
        gops=_limits(loaded, before, after).gops,
        bf16_gflops=(before.bf16_gflops + after.bf16_gflops) / 2,
    )


@dataclass(frozen=True)
class _Run:
    """The figures of one run; floors, limits and times by part, in ms."""

    figures: Figures
    floors_ms: Figures
    limits_ms: Figures
    spent_ms: Figures


def _run(loaded: LoadedModel, prompts: list[Prompt], before: Ceilings) -> tuple[_Run, Ceilings]:
    """Run once; also return the ceilings after it."""
    activity = Activity()
    phases_before = loaded.model.phase_ns()
    started_ns = time.perf_counter_ns()
    _, steps = drive(loaded.make_core(), prompts)
    seconds = (time.perf_counter_ns() - started_ns) / 1e9
    spent_ms = {name: (ns - phases_before[name]) / 1e6 for name, ns in loaded.model.phase_ns().items()}
    after = loaded.measure_ceilings()
    others = activity.others()  # whoever takes a core while ceilings are measured lowers them
    limits = _limits(loaded, before, after)
    floors = floors_ns(loaded.costs, steps.records, dict.fromkeys(PARTS, limits))
    own = floors_ns(loaded.costs, steps.records, _own_limits(loaded, before, after))
    floor_s = sum(floors.values()) / 1e9
    figures = {
        "roofline_percent": 100 * floor_s / seconds,
        "floor_s": floor_s,
        "seconds": seconds,
        "output_tok_s": sum(prompt.num_new for prompt in prompts) / seconds,
        "peak_gops": limits.gops,
        "copy_gb_s": limits.gb_s,
        **others,
    }
    spent_ms[OUTSIDE] = 1e3 * seconds - sum(spent_ms.values())
    return _Run(figures, _in_ms(floors), _in_ms(own), spent_ms), after


def _in_ms(nanoseconds: Mapping[str, float]) -> Figures:
    return {name: ns / 1e6 for name, ns in nanoseconds.items()}


def main() -> None:
    """Measure and print."""
    options = _parse()
    workload = load_workload(options.workload)
    wait_for_quiet(options.quiet_wait)
    yardstick_before = yardstick(options.threads)
    loaded = LoadedModel(engine_options(options))
    print(f"{versions()}\n{yardstick_before}\n{loaded.description}")
    drive(loaded.make_core(), workload.warm_up())
    ceilings = loaded.measure_ceilings()
    print(describe(ceilings))
    runs: list[_Run] = []
    for number in range(options.runs):
        wait_for_quiet(options.quiet_wait)
        run, ceilings = _run(loaded, workload.prompts("W2", number, options.requests), ceilings)
        runs.append(run)
    figures = [run.figures for run in runs]
    print_figures(f"W2, {len(runs)} runs", figures)
    _print_parts(runs)
    wait_for_quiet(options.quiet_wait)
    yardstick_after = yardstick(options.threads)
    print(yardstick_after)
    write_json(
        options.json,
        {
            "engine": loaded.description,
            "yardstick": [yardstick_before, yardstick_after],
            "runs": figures,
            "floors_ms": [run.floors_ms for run in runs],
            "limits_ms": [run.limits_ms for run in runs],
            "spent_ms": [run.spent_ms for run in runs],
        },
    )


def _print_parts(runs: list[_Run]) -> None:
    floors, spent = medians([run.floors_ms for run in runs]), medians([run.spent_ms for run in runs])
    limits = medians([run.limits_ms for run in runs])
    total_ms = sum(spent.values())
    rows: list[list[object]] = []
    for name in (*PHASES, OUTSIDE):
        floor_ms = floors.get(name)
        shares = ["", "", "", ""]
        if floor_ms is not None:
            figures = (floor_ms, limits[name], 100 * floor_ms / spent[name], 100 * limits[name] / spent[name])
            shares = [f"{figure:.0f}" for figure in figures]
        rows.append(
            [
                name.replace("_", " "),
                *shares[:2],
                f"{spent[name]:.0f}",
                *shares[2:],
                100 * spent[name] / total_ms,
            ]
        )
    print_table(
        ["part, median", "floor ms", "limit ms", "took ms", "floor %", "limit %", "of the time %"], rows
    )
    rest_ms = total_ms - sum(spent[part] for part in PARTS)
    best_ms = sum(limits.values()) + rest_ms
    print(f"with all parts at their limits: {100 * sum(floors.values()) / best_ms:.0f} % of the roofline")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_run_options(parser)
    add_engine_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
