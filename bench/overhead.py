"""What being seen costs: `python -m bench.overhead [-- serve options]`.

Runs W2 of the workload (64 requests at once) through the real server over HTTP in three ways, in turn, and
prints the output tokens per second of each, the CPU time that each takes for a thousand tokens, and their
ratios (of the CPU time, the inverse: tokens for a second of it):

  nothing recorded   `python -m bench.unrecorded`: no live view and no history; the step records are still
                     made, since they are part of the engine
  recorded           the server as it is: every step folded, written to the history, nobody watching
  10 dashboards      the same with 10 pages connected to /ws/engine that take and acknowledge all messages
                     (their client, one process for all ten, runs on the same cores and counts as cost)

Each way keeps its server for the whole sitting; the servers that are not being measured are stopped
(SIGSTOP) meanwhile. The ratios are medians of the ratios of neighbouring runs, so that a machine whose speed
changes slowly does not change them. What stands after `--` goes to `pageglass serve`.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

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
from bench.online import measure, warm_up
from bench.server import RunningServer, running_server
from bench.suspension import Suspension
from bench.workload import Workload, add_run_options, load_workload

WAYS = {"nothing recorded": "bench.unrecorded", "recorded": "app", "10 dashboards": "app"}
NUM_DASHBOARDS = 10
RATIOS = (("recorded", "nothing recorded"), ("10 dashboards", "recorded"))


@contextmanager
def dashboards(url: str, figures: Figures) -> Iterator[int]:
    """Have pages watch the server during the block, which gets their process; then add what they took."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.dashboards", url, "--number", str(NUM_DASHBOARDS)],
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
        yield process.pid
        process.stdin.close()
        figures.update(json.loads(process.stdout.read()))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def run_way(way: str, server: RunningServer, workload: Workload, run: int, limit: int | None) -> Figures:
    """Return the figures of one run of W2.

    `cpu_s` is the CPU time of the server, and of the pages' client, for a thousand output tokens. It changes
    less with what else the machine does than the time on the clock.
    """
    taken: Figures = {}
    with dashboards(server.url, taken) if way == "10 dashboards" else nullcontext(None) as client:
        activity = Activity(server.pid, *([client] if client else []))
        figures = measure(server, workload, "W2", run, limit=limit)
        cpu_s = activity.own_cpu_s()
    num_tokens = figures["output_tok_s"] * figures["seconds"]
    return {**figures, **taken, "cpu_s": cpu_s / num_tokens * 1000}


def main() -> None:
    """Measure and print."""
    options, serve_args = _parse()
    end_on_signal()
    workload = load_workload(options.workload)
    print(versions())
    wait_for_quiet(options.quiet_wait)
    before = yardstick()
    print(before)
    results: dict[str, list[Figures]] = {way: [] for way in WAYS}
    with ExitStack() as stack:
        sides: dict[str, tuple[RunningServer, Suspension]] = {}
        for way, module in WAYS.items():
            server = stack.enter_context(running_server(serve_args, module))
            warm_up(server, workload)
            sides[way] = server, stack.enter_context(Suspension(server.pid))
        for run in range(options.runs):
            for way, (server, suspension) in sides.items():
                wait_for_quiet(options.quiet_wait)
                with suspension.lifted():
                    results[way].append(run_way(way, server, workload, run, options.requests))
    _report(results)
    wait_for_quiet(options.quiet_wait)
    after = yardstick()
    print(after)
    write_json(options.json, {"yardstick": [before, after], "runs": results})


def _report(results: dict[str, list[Figures]]) -> None:
    rows: list[list[object]] = []
    for way, runs in results.items():
        speeds = [run["output_tok_s"] for run in runs]
        messages = statistics.median(run.get("dashboard_messages", 0) for run in runs)
        cpu_s = statistics.median(run["cpu_s"] for run in runs)
        rows.append([way, statistics.median(speeds), min(speeds), max(speeds), cpu_s, messages])
    print_table(
        ["W2 over HTTP, output tok/s", "median", "min", "max", "CPU s for 1,000 tokens", "messages"], rows
    )
    for way, runs in results.items():
        print_disturbed(way, runs)
    ratios = [
        [f"{way} ÷ {other}, {what}", *_ratios(results[way], results[other], name)]
        for way, other in RATIOS
        for name, what in (("output_tok_s", "tok/s"), ("cpu_s", "tokens for a second of CPU"))
    ]
    print_table(["ratio", "median", "min", "max"], ratios)


def _ratios(runs: list[Figures], others: list[Figures], name: str) -> list[object]:
    ratios = [run[name] / other[name] for run, other in zip(runs, others, strict=True)]
    if name == "cpu_s":
        ratios = [1 / ratio for ratio in ratios]
    return [statistics.median(ratios), min(ratios), max(ratios)]


def _parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_run_options(parser)
    options, rest = parser.parse_known_args()
    return options, [argument for argument in rest if argument != "--"]


if __name__ == "__main__":
    main()
