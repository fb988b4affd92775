"""Our server under arrivals: `python -m bench.online --rate 2.06 [-- serve options]`.

Runs W4 of the workload (see `python -m bench.workload --help`): 100 requests arrive one by one at --rate
requests a second, or at --share of what the server can do (W2 over HTTP: 64 requests at once). Answers are
streamed over HTTP to a client in a process of its own. Prints percentiles of the time from a request's
arrival to the first piece of its answer and of the time between pieces, each the median of the runs.

Every run has a server of its own with an empty prefix cache; 16 short requests warm it up. What stands
after `--` goes to `pageglass serve`, such as: -- --dtype int8 --kv-memory 600MiB
"""

import argparse
import statistics

from bench.common import (
    Activity,
    Figures,
    end_on_signal,
    peak_memory_mb,
    print_figures,
    versions,
    wait_for_quiet,
    write_json,
    yardstick,
)
from bench.http_client import LoadJob, run_load_apart
from bench.server import RunningServer, running_server
from bench.workload import Workload, add_run_options, load_workload

CAPACITY_RUNS = 3


def measure(
    server: RunningServer,
    workload: Workload,
    case: str,
    run: int,
    *,
    rate: float | None = None,
    limit: int | None = None,
) -> Figures:
    """Send one run of a case to a server; `rate` in requests a second spreads the arrivals of W4."""
    prompts = workload.prompts(case, run, limit)
    job = LoadJob(
        server.url, case, prompts, None if rate is None else workload.arrivals_s(rate), server.model
    )
    activity = Activity()
    figures = run_load_apart(job)
    return {**figures, **activity.others(), "peak_mb": peak_memory_mb(server.pid)}


def warm_up(server: RunningServer, workload: Workload) -> None:
    """Send 16 short requests that no measured run repeats."""
    run_load_apart(LoadJob(server.url, "W2", workload.warm_up(), model=server.model))


def capacity(workload: Workload, serve_args: list[str]) -> float:
    """Return how many requests of W2 the server completes in a second, all sent at once."""
    with running_server(serve_args) as server:
        warm_up(server, workload)
        seconds = [measure(server, workload, "W2", run)["seconds"] for run in range(CAPACITY_RUNS)]
    return len(workload.prompts("W2", 0)) / statistics.median(seconds)


def main() -> None:
    """Measure and print."""
    options, serve_args = _parse()
    end_on_signal()
    workload = load_workload(options.workload)
    print(versions())
    wait_for_quiet(options.quiet_wait)
    before = yardstick()
    print(before)
    rate = options.rate
    if rate is None:
        rate = options.share * capacity(workload, serve_args)
    runs = []
    for run in range(options.runs):
        wait_for_quiet(options.quiet_wait)
        with running_server(serve_args) as server:
            warm_up(server, workload)
            figures = measure(server, workload, options.case, run, rate=rate, limit=options.requests)
            runs.append({**figures, "ready_s": server.ready_s})
    print_figures(f"{options.case} at {rate:.2f} requests/s, {options.runs} runs", runs)
    wait_for_quiet(options.quiet_wait)
    after = yardstick()
    print(after)
    write_json(
        options.json,
        {"rate": rate, "serve": serve_args, "yardstick": [before, after], "runs": {options.case: runs}},
    )


def _parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--case", choices=("W4",), default="W4", help="default: %(default)s")
    rates = parser.add_mutually_exclusive_group()
    rates.add_argument("--rate", type=float, help="requests a second")
    rates.add_argument("--share", type=float, default=0.7, help="of the W2 throughput (default: %(default)s)")
    add_run_options(parser, runs=3)
    options, rest = parser.parse_known_args()
    return options, [argument for argument in rest if argument != "--"]


if __name__ == "__main__":
    main()
