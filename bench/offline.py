"""Our engine without a server: `python -m bench.offline --case W2 --dtype q4`.

Runs a case of the workload (see `python -m bench.workload --help`) in this process, through the same loader
and engine as the server, and prints for each figure the median, smallest and largest of all runs:

  W1  time to the first token, and tokens per second after it
  W2  output tokens per second, all tokens per second, number of steps, and the split of the steps' time:
      forward (the model), sample (choosing tokens), schedule (deciding), host (all the rest); in steps of
      64 sequences, the milliseconds outside forward and sample; peak memory of this process
  W3  the same with a shared prefix: n without a prefix cache, p with an empty one, w with a warm one

The machine's yardstick is measured before and after: compare figures of one sitting only. A run during
which other processes used the machine is named. --requests cuts a case down to try something out.
"""

import argparse

from bench.common import (
    Activity,
    Figures,
    peak_memory_mb,
    print_figures,
    versions,
    wait_for_quiet,
    write_json,
    yardstick,
)
from bench.own_engine import OwnEngine, add_engine_options, engine_options
from bench.workload import Workload, add_run_options, load_workload

CASES = {
    "W1": ("W1",),
    "W2": ("W2",),
    "W3": ("W3n", "W3p", "W3w"),
    "W3n": ("W3n",),
    "W3p": ("W3p",),
    "W3w": ("W3w",),
}


def main() -> None:
    """Measure and print."""
    options = _parse()
    workload = load_workload(options.workload)
    wait_for_quiet(options.quiet_wait)
    before = yardstick(options.threads)
    engine = OwnEngine(engine_options(options))
    loaded_mb = peak_memory_mb()
    print(versions())
    print(before)
    print(f"{engine.description}; loaded in {engine.load_s:.1f} s")
    engine.run("W2", workload.warm_up())
    results = {}
    for case in CASES[options.case]:
        results[case] = [_run(engine, workload, case, options, run) for run in range(options.runs)]
        print_figures(f"{case}, {options.runs} runs", results[case])
    peak_mb = peak_memory_mb()
    print(f"peak memory: {loaded_mb:.0f} MB after loading, {peak_mb:.0f} MB in the end")
    wait_for_quiet(options.quiet_wait)
    after = yardstick(options.threads)
    print(after)
    memory = {"loaded_mb": loaded_mb, "peak_mb": peak_mb}
    write_json(
        options.json,
        {
            "engine": engine.description,
            "yardstick": [before, after],
            "memory": memory,
            "runs": results,
        },
    )


def _run(engine: OwnEngine, workload: Workload, case: str, options: argparse.Namespace, run: int) -> Figures:
    wait_for_quiet(options.quiet_wait)
    activity = Activity()
    figures = engine.run(case, workload.prompts(case, run, options.requests))
    return {**figures, **activity.others()}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="W2", help="default: %(default)s")
    add_run_options(parser)
    add_engine_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
