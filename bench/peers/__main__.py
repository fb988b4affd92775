"""Ours against another engine: `python -m bench.peers --peer openvino-int8 --case W2`.

Installs the peer if it is not there (into --home, each in an environment of its own), then runs the same case
of the workload (see `python -m bench.workload --help`) on our engine and on the peer, in turn: A, B, A, B, …
Both stay loaded, each in a process of its own; the one that is not measured is stopped (SIGSTOP) meanwhile.
Every run begins without a cached prefix, except in W3w. Prints the medians of both and the ratio ours ÷ peer
(of the medians, and the smallest and largest of the rounds), with the yardstick before and after.

How they are driven:
  ours          in the process; W4: through HTTP, a new server for each run
  openvino      in the process, its continuous batching
  vllm          in the process; W4: through HTTP. W1's first token: the time of a request for one token.
                W3n: each prompt's first token is replaced, as its prefix cache is always on
  llamacpp      through its server's HTTP, 16 slots (--slots)
  transformers  in the process, `generate` in batches of 16; W3p: the prefix is computed once

On a machine that others use, too: --quiet-wait waits for a quiet moment before each run, and --retries
repeats rounds during which other processes (not the figures) were busy.

--requests cuts a case down to try something out. --only-peer measures the peer alone, --install-only nothing.
"""

import argparse
import os
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.common import (
    Figures,
    add_quiet_option,
    end_on_signal,
    is_disturbed,
    versions,
    wait_for_quiet,
    write_json,
    yardstick,
)
from bench.own_engine import add_engine_options, engine_options
from bench.peers.driver import Job
from bench.peers.install import install
from bench.peers.report import print_results, warn_if_changed
from bench.peers.table import DEFAULT_HOME, PEERS, Home
from bench.peers.worker import Worker, start_own, start_peer
from bench.workload import CASES, Workload, add_workload_option, load_workload


def main() -> None:
    """Measure and print."""
    options = _parse()
    end_on_signal()
    peer, home = PEERS[options.peer], Home(options.home.expanduser().absolute())
    if options.case not in peer.cases:
        raise SystemExit(f"{options.peer} cannot run {options.case}; it can run {', '.join(peer.cases)}.")
    if options.case == "W4" and options.rate is None:
        raise SystemExit("W4 needs --rate, in requests a second.")
    install(options.peer, home)
    if options.install_only:
        return
    workload = load_workload(options.workload)
    print(versions())
    wait_for_quiet(options.quiet_wait)
    before = yardstick(options.threads)
    print(before)
    with ExitStack() as stack:
        sides: dict[str, Worker] = {}
        if not options.only_peer:
            sides["ours"] = stack.enter_context(_start_own(options))
        sides[options.peer] = stack.enter_context(_start_peer(options, home))
        for name, side in sides.items():
            print(f"{name}: {side.description}")
        results = _alternate(sides, workload, options)
    wait_for_quiet(options.quiet_wait)
    after = yardstick(options.threads)
    rate = "" if options.rate is None else f" at {options.rate:.2f} requests/s"
    print_results(f"{options.case}{rate}, {options.rounds} rounds", results)
    print(after)
    warn_if_changed(before, after)
    write_json(
        options.json,
        {"case": options.case, "rate": options.rate, "yardstick": [before, after], "runs": results},
    )


def _start_own(options: argparse.Namespace) -> Worker:
    engine = engine_options(options)
    if options.case == "W4":
        return start_own("run_own_server", {"arguments": engine.arguments()})
    return start_own("run_own", asdict(engine))


def _start_peer(options: argparse.Namespace, home: Home) -> Worker:
    settings: dict[str, Any] = {"threads": options.threads or os.cpu_count()}
    if options.slots is not None:
        settings["slots"] = options.slots
    return start_peer(PEERS[options.peer], home, options.case, settings)


def _alternate(
    sides: dict[str, Worker], workload: Workload, options: argparse.Namespace
) -> dict[str, list[Figures]]:
    """Return the figures of all rounds, each side once a round."""
    warm_up = Job("W2", workload.warm_up())
    for side in sides.values():
        side.run(warm_up)
    results: dict[str, list[Figures]] = {name: [] for name in sides}
    num_left = options.retries
    for number in range(options.rounds):
        found = _run_round(sides, workload, options, number)
        while num_left and any(is_disturbed(figures) for figures in found.values()):
            num_left -= 1
            print(f"round {number + 1} was disturbed and is repeated", file=sys.stderr)
            found = _run_round(sides, workload, options, number)
        for name, figures in found.items():
            results[name].append(figures)
    return results


def _run_round(
    sides: dict[str, Worker], workload: Workload, options: argparse.Namespace, number: int
) -> dict[str, Figures]:
    case = options.case
    prompts = workload.prompts(case, number, options.requests)
    arrivals_s = workload.arrivals_s(options.rate)[: len(prompts)] if case == "W4" else None
    results = {}
    for name, side in sides.items():
        wait_for_quiet(options.quiet_wait)
        if case == "W1":  # so short that it would measure how cold the other side has left the caches
            side.run(Job(case, workload.variants[case][0]))
        results[name] = side.run(Job(case, prompts, arrivals_s))
    return results


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--peer", choices=PEERS, required=True)
    parser.add_argument("--case", choices=CASES, default="W2", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--rate", type=float, help="requests a second of W4")
    parser.add_argument("--home", type=Path, default=DEFAULT_HOME, help="folder of the peers (%(default)s)")
    parser.add_argument("--slots", type=int, help="slots of llama.cpp's server (default: 16)")
    parser.add_argument("--requests", type=int, help="only the first so many requests of the case")
    parser.add_argument("--only-peer", action="store_true", help="measure the peer alone")
    parser.add_argument("--install-only", action="store_true", help="install the peer and end")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file, too")
    parser.add_argument(
        "--retries", type=int, default=0, help="rounds to repeat because others were busy (default: 0)"
    )
    add_quiet_option(parser)
    add_workload_option(parser)
    add_engine_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
