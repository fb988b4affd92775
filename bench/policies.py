"""Preemption policies compared on slices of two traces: `python -m bench.policies [--real]`.

Simulates each slice of bench/data with each policy, by recompute and by swap, in a pool so small that blocks
run out, and prints the tables of docs/policies.md. Step costs are the built-in ones of the default model, so
these figures are the same everywhere. TTFT is from arrival.

With --real, two of the policies are also run by the real engine in this process, in real time (five minutes),
and the simulator's error is printed: its costs are then fitted to a run of another part of the trace.
A second simulation, with costs fitted to the run itself, tells how much of that the machine's speed is, which
changes from run to run.
"""

import argparse
import json
from collections.abc import Iterable

import msgspec

from app.services.simulations import DEFAULT_COPY_NS, DEFAULT_COSTS
from bench.common import (
    Activity,
    add_quiet_option,
    is_disturbed,
    print_table,
    versions,
    wait_for_quiet,
    yardstick,
)
from bench.common import Figures as MachineFigures
from bench.policy_loads import CASES, Case, RealEngine
from engine.config import EngineConfig
from engine.records import StepRecord
from engine.scheduling.preemption import PREEMPTION_POLICIES
from engine.simulate.costs import CostFit, StepCosts
from engine.simulate.figures import Figures, Measurement
from engine.simulate.pace import ReckonedPace
from engine.simulate.simulation import simulate
from engine.simulate.workload import SimulatedLoad

MODES = ("recompute", "swap")
REAL_RUNS = (("newest-first", "recompute"), ("smallest-residual", "swap"))
"""What the real engine is asked to do, too."""

_HEADER = [
    "victim",
    "mode",
    "TTFT mean ms",
    "TTFT p99 ms",
    "inter-token p99 ms",
    "output tok/s",
    "preemptions",
    "recompute tax %",
]
_REAL_HEADER = ["victim", "mode", "", "TTFT mean ms", "TTFT p99 ms", "output tok/s", "preemptions", "tax %"]


def main() -> None:
    """Simulate, run for real if asked to, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--real", action="store_true", help="run two policies for real, too")
    parser.add_argument("--only", choices=[case.file for case in CASES], help="one of the slices")
    add_quiet_option(parser)
    options = parser.parse_args()
    cases = [case for case in CASES if options.only in {None, case.file}]
    for case in cases:
        print(f"\n{case.describe()}\n")
        print_simulated(case)
    if options.real:
        print(f"\n{versions()}")
        wait_for_quiet(options.quiet_wait)
        print(yardstick())
        engine = RealEngine()
        print(engine.description)
        for case in cases:
            print_real(case, engine, options.quiet_wait)
        print(yardstick())


def print_simulated(case: Case) -> None:
    """Print the table of all policies."""
    load = case.load()
    rows: list[list[object]] = []
    for policy in PREEMPTION_POLICIES:
        for mode in MODES:
            pace = ReckonedPace(DEFAULT_COSTS, copy_ns_per_block=DEFAULT_COPY_NS)
            figures = simulate(case.config(policy, mode), load, pace)
            rows.append(
                [
                    policy,
                    mode,
                    *_rounded(
                        figures.ttft_mean_ms,
                        figures.ttft_p99_ms,
                        figures.inter_token_p99_ms,
                        figures.output_tok_s,
                    ),
                    figures.num_preemptions,
                    figures.recompute_percent,
                ]
            )
    print_table(_HEADER, rows)


def print_real(case: Case, engine: RealEngine, quiet_wait_s: float) -> None:
    """Fit costs to one part of a slice, run another for real and simulated, and print both with the error."""
    wait_for_quiet(quiet_wait_s)
    costs = _fit(engine.run(case.config(), case.load(case.costs_from, case.num_costs))[0])
    print(
        f"\n{case.name}, the first {case.num_real} requests; costs fitted to {case.num_costs} others, in ns:"
    )
    print(json.dumps({name: round(value) for name, value in msgspec.structs.asdict(costs).items()}) + "\n")
    load = case.load(0, case.num_real)
    rows: list[list[object]] = []
    machines = []
    for policy, mode in REAL_RUNS:
        wait_for_quiet(quiet_wait_s)
        records, due_ns, machine = _run(engine, case.config(policy, mode), load)
        machines.append(machine)
        real = _measure(records, due_ns)
        rows.append([policy, mode, "real", *_short_row(real)])
        for name, known in (("simulated", costs), ("simulated, own costs", _fit(records))):
            pace = ReckonedPace(known, copy_ns_per_block=engine.copy_ns_per_block)
            simulated = simulate(case.config(policy, mode), load, pace)
            rows.append([policy, mode, name, *_short_row(simulated)])
            rows.append([policy, mode, "error %", *_errors(real, simulated), "", ""])
    print_table(_REAL_HEADER, rows)
    for (policy, mode), machine in zip(REAL_RUNS, machines, strict=True):
        if is_disturbed(machine):
            used = ", ".join(f"{name} {value:.2f}" for name, value in machine.items())
            print(f"\n{policy} by {mode} was disturbed by others: {used}")


def _run(
    engine: RealEngine, config: EngineConfig, load: SimulatedLoad
) -> tuple[list[StepRecord], dict[str, int], MachineFigures]:
    activity = Activity()
    records, due_ns = engine.run(config, load)
    return records, due_ns, activity.others()


def _measure(records: Iterable[StepRecord], due_ns: dict[str, int]) -> Figures:
    measurement = Measurement(due_ns)
    for record in records:
        measurement.add(record)
    return measurement.figures()


def _fit(records: Iterable[StepRecord]) -> StepCosts:
    fit = CostFit()
    for record in records:
        fit.add(record)
    return fit.fit()


def _short_row(figures: Figures) -> list[object]:
    times = _rounded(figures.ttft_mean_ms, figures.ttft_p99_ms, figures.output_tok_s)
    return [*times, figures.num_preemptions, figures.recompute_percent]


def _rounded(*values: float | None) -> list[object]:
    return [round(value) if value is not None else "-" for value in values]


def _errors(real: Figures, simulated: Figures) -> list[object]:
    pairs = [
        (real.ttft_mean_ms, simulated.ttft_mean_ms),
        (real.ttft_p99_ms, simulated.ttft_p99_ms),
        (real.output_tok_s, simulated.output_tok_s),
    ]
    return [
        f"{100 * (value / measured - 1):+.1f}" if measured and value else "-" for measured, value in pairs
    ]


if __name__ == "__main__":
    main()
