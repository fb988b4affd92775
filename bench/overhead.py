"""What being seen costs: `python -m bench.overhead --runs 7 --quiet-wait 60 [-- serve options]`.

Runs W2 of the workload (64 requests at once) through the real server over HTTP in three ways, in turn:

  nothing recorded   `python -m bench.unrecorded`: no live view and no history; the step records are still
                     made, since they are part of the engine
  recorded           the server as it is: every step folded, written to the history, nobody watching
  10 dashboards      the same server with 10 pages connected to /ws/engine that take and acknowledge all
                     messages (one client process for all ten)

The spread of the machine, which is ten times the cost, hides it in tokens per second. So this measures the
cost itself, as CPU time by thread (`bench.server_probe`), up to where the server has caught up with what it
has put off. For each round, per output token:

  cost = (CPU time of all but the engine's threads with the feature - without) / that of the engine's threads

The engine's threads are its own and those of the kernels; the others are the event loop, the history's writer
and whatever they start. The clients, of requests as of pages, are other processes and do not count: they
would run elsewhere. Where the engine's threads keep all cores busy, a second of CPU time that others take is
a second that the engine lacks, and tokens per second fall to 1 / (1 + cost), which is no less than 1 - cost;
where a core is idle at times (see the cores that the engine uses) they fall by less. What others do beside
taking time shows elsewhere: holding the interpreter when the engine needs it, in the time of a step outside
the model, which is on the clock; taking the caches, in the CPU time of the engine's threads. So

  bound = 1 - cost - (time outside the model with the feature - without) / time of a step

is the least that the ratio of tokens per second can be, but for the caches. The loss itself, by whatever way,
shows in the cores that the engine uses, its CPU time over the time on the clock: tokens per second are these
cores over the CPU time of a token, and the state of the machine, which changes the latter by a tenth, leaves
the cores alone. So the ratio of the cores is the ratio of tokens per second with the caches and the machine's
state left out; the clients' time, which is taken from the engine here, is in it.

Both servers live for the whole sitting; the one that is not being measured is stopped (SIGSTOP) meanwhile.
No run repeats another's prompts. Tokens per second and the ratios of neighbouring runs are given as well.
What stands after `--` goes to `pageglass serve`.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import NamedTuple

from bench.common import (
    ROOT,
    Activity,
    Figures,
    end_on_signal,
    print_disturbed,
    print_table,
    versions,
    wait_for_quiet,
    write_json,
    yardstick,
)
from bench.http_client import LoadJob, run_load_apart
from bench.online import warm_up
from bench.server import RunningServer, running_server
from bench.server_probe import ENGINE, LOOP, ServerProbe
from bench.suspension import Suspension
from bench.workload import Prompt, Workload, add_run_options, load_workload

NUM_DASHBOARDS = 10
RECORDING, WATCHING = "recording", f"{NUM_DASHBOARDS} dashboards"


class Way(NamedTuple):
    """A server, by its module, and how many pages watch it."""

    module: str
    num_dashboards: int = 0


WAYS = {
    "nothing recorded": Way("bench.unrecorded"),
    "recorded": Way("bench.recorded"),
    WATCHING: Way("bench.recorded", NUM_DASHBOARDS),
}
COSTS = {RECORDING: ("recorded", "nothing recorded"), WATCHING: (WATCHING, "recorded")}
"""What has a cost: the way with it, the way without."""


@contextmanager
def dashboards(url: str, number: int, figures: Figures) -> Iterator[None]:
    """Have pages watch the server during the block, then add what they took."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.dashboards", url, "--number", str(number)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        if process.stdout.readline().strip() != "connected":
            raise SystemExit("the dashboards could not connect")
        yield
        process.stdin.close()
        figures.update(json.loads(process.stdout.read()))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def fresh(prompts: list[Prompt], run: int) -> list[Prompt]:
    """Return prompts as long that begin otherwise: no prefix cache serves one run from another."""
    return [replace(prompt, token_ids=[1 + run, *prompt.token_ids[1:]]) for prompt in prompts]


def run_way(way: Way, server: RunningServer, prompts: list[Prompt]) -> Figures:
    """Return the figures of one run. CPU times are of the server, in seconds for a thousand output tokens."""
    taken: Figures = {}
    watched = dashboards(server.url, way.num_dashboards, taken) if way.num_dashboards else nullcontext()
    probe = ServerProbe(server.pid)
    with watched:
        probe.settle()
        activity, before = Activity(), probe.read()
        figures = run_load_apart(LoadJob(server.url, "W2", prompts, model=server.model))
        disturbance = activity.others()
        probe.settle()
        used = probe.read().since(before)
    per_thousand = 1000 / sum(prompt.num_new for prompt in prompts)
    return {
        **figures,
        **taken,
        **disturbance,
        **{f"{name} cpu_s": seconds * per_thousand for name, seconds in used.cpu_s.items()},
        "engine_cpu_s": used.engine_s * per_thousand,
        "others_cpu_s": used.others_s * per_thousand,
        "engine_cores": used.engine_s / figures["seconds"],
        "outside_ms": used.outside_s / used.num_steps * 1e3,
        "step_ms": figures["seconds"] / used.num_steps * 1e3,
    }


def cost_percent(with_it: Figures, without: Figures) -> float:
    """Return the CPU time that a feature takes elsewhere, in percent of the engine's, per output token."""
    engine_s = (with_it["engine_cpu_s"] + without["engine_cpu_s"]) / 2
    return 100 * (with_it["others_cpu_s"] - without["others_cpu_s"]) / engine_s


def bound(with_it: Figures, without: Figures) -> float:
    """Return the least that the ratio of tokens per second can be, but for what the caches make of it."""
    waited = (with_it["outside_ms"] - without["outside_ms"]) / without["step_ms"]
    return 1 - cost_percent(with_it, without) / 100 - waited


def measure(runs: int, workload: Workload, limit: int | None, options: "Sitting") -> dict[str, list[Figures]]:
    """Return the figures of all runs by way."""
    results: dict[str, list[Figures]] = {name: [] for name in WAYS}
    with ExitStack() as stack:
        sides: dict[str, tuple[RunningServer, Suspension]] = {}
        for module in sorted({way.module for way in WAYS.values()}):
            server = stack.enter_context(running_server(options.serve_args, module))
            warm_up(server, workload)
            sides[module] = server, stack.enter_context(Suspension(server.pid))
        for run in range(runs):
            names = list(WAYS) if run % 2 == 0 else list(reversed(WAYS))
            for number, name in enumerate(names):
                server, suspension = sides[WAYS[name].module]
                prompts = fresh(workload.prompts("W2", run, limit), len(WAYS) * run + number)
                wait_for_quiet(options.quiet_wait)
                with suspension.lifted():
                    results[name].append(run_way(WAYS[name], server, prompts))
    return results


class Sitting(NamedTuple):
    """What holds for all runs."""

    serve_args: list[str]
    quiet_wait: float


def main() -> None:
    """Measure and print."""
    options, serve_args = _parse()
    end_on_signal()
    workload = load_workload(options.workload)
    print(versions())
    wait_for_quiet(options.quiet_wait)
    before = yardstick()
    print(before)
    sitting = Sitting(serve_args, options.quiet_wait)
    results = measure(options.runs, workload, options.requests, sitting)
    _report(results)
    wait_for_quiet(options.quiet_wait)
    after = yardstick()
    print(after)
    write_json(options.json, {"yardstick": [before, after], "runs": results})


def _report(results: dict[str, list[Figures]]) -> None:
    def median_of(name: str, figure: str) -> float:
        return statistics.median(run.get(figure, 0.0) for run in results[name])

    print_table(
        ["W2 over HTTP, medians", *WAYS],
        [
            [title, *(f"{median_of(name, figure):z.{digits}f}" for name in WAYS)]
            for title, figure, digits in _lines(results)
        ],
    )
    for name, runs in results.items():
        print_disturbed(name, runs)
    rows: list[list[object]] = []
    for feature, (name, other) in COSTS.items():
        pairs = list(zip(results[name], results[other], strict=True))
        for title, values in (
            ("CPU time elsewhere, % of the engine's", [cost_percent(*pair) for pair in pairs]),
            ("bound of the ratio of tok/s", [bound(*pair) for pair in pairs]),
            ("ratio of the engine's cores", [a["engine_cores"] / b["engine_cores"] for a, b in pairs]),
            ("ratio of the engine's CPU time", [a["engine_cpu_s"] / b["engine_cpu_s"] for a, b in pairs]),
            ("ratio of tok/s", [a["output_tok_s"] / b["output_tok_s"] for a, b in pairs]),
        ):
            numbers = (statistics.median(values), min(values), max(values))
            rows.append([feature, title, *(f"{number:.3f}" for number in numbers)])
    print()
    print_table(["of", "", "median", "min", "max"], rows)


def _lines(results: dict[str, list[Figures]]) -> list[tuple[str, str, int]]:
    """Return the lines of the table of ways: title, figure, digits."""
    suffix = " cpu_s"
    used = {figure for runs in results.values() for run in runs for figure in run if figure.endswith(suffix)}
    others = sorted(used - {f"{ENGINE}{suffix}", f"{LOOP}{suffix}"})
    return [
        ("output tok/s", "output_tok_s", 0),
        ("cores of the engine", "engine_cores", 2),
        ("a step, ms", "step_ms", 1),
        ("of it outside the model, ms", "outside_ms", 3),
        ("CPU s for 1,000 tokens: engine", "engine_cpu_s", 3),
        ("everything else", "others_cpu_s", 4),
        ("of it the event loop", f"{LOOP}{suffix}", 4),
        *((f"of it {figure.removesuffix(' cpu_s')}", figure, 4) for figure in others),
        ("messages to pages", "dashboard_messages", 0),
    ]


def _parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_run_options(parser)
    options, rest = parser.parse_known_args()
    return options, [argument for argument in rest if argument != "--"]


if __name__ == "__main__":
    main()
