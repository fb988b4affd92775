"""What the overhead benchmark makes of CPU times, and the probe that reads them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bench.common import ROOT
from bench.overhead import bound, cost_percent, fresh
from bench.server_probe import ENDED, ENGINE, LOOP, Reading, ServerProbe
from bench.workload import Prompt

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

BURNED_S = 0.03

# A server's threads in small: each uses so much CPU time, waits for a line, and does the same again.
SERVER = f"""
import sys, threading, time
from bench.server_probe import install

def burn(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass

def engine():
    helper = threading.Thread(target=burn, args=({BURNED_S},), name="pageglass-engine-helper")
    helper.start()
    helper.join()
    burn({BURNED_S})
    stop.wait()

install()
stop = threading.Event()
for name in ("pageglass-engine", "pageglass-engine", "writer_1", "writer_2"):
    threading.Thread(target=engine if name == "pageglass-engine" else lambda: (burn({BURNED_S}), stop.wait()),
                     name=name, daemon=True).start()
gone = threading.Thread(target=burn, args=({BURNED_S},))
gone.start()
gone.join()
print("ready", flush=True)
sys.stdin.readline()
burn({BURNED_S})
print("burned", flush=True)
sys.stdin.readline()
"""


@contextmanager
def running(source: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", source],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def say(process: subprocess.Popen[str], expected: str) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    hear(process, expected)


def hear(process: subprocess.Popen[str], expected: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == f"{expected}\n"


def test_cpu_time_is_told_apart_by_thread_and_none_is_lost() -> None:
    with running(SERVER) as process:
        hear(process, "ready")
        probe = ServerProbe(process.pid)
        probe.settle()
        first = probe.read()
        say(process, "burned")
        later = probe.read().since(first)

    assert first.engine_s >= 2 * BURNED_S
    assert first.cpu_s["writer"] >= 2 * BURNED_S
    assert first.cpu_s[ENDED] >= 3 * BURNED_S  # two helpers, and the one that is gone
    assert later.cpu_s[LOOP] >= BURNED_S
    assert later.others_s >= BURNED_S
    assert (later.num_steps, later.outside_s) == (0, 0)


def test_a_process_that_cannot_be_probed_is_an_error() -> None:
    with pytest.raises(OSError, match="refused"):
        ServerProbe(os.getpid()).read()


def test_what_was_used_in_between_counts_threads_that_came_and_went() -> None:
    earlier = Reading({ENGINE: 2.0, LOOP: 1.0, "writer": 0.5}, 10, 0.25)
    later = Reading({ENGINE: 5.0, LOOP: 1.5, "encoder": 0.125}, 30, 0.75)

    used = later.since(earlier)

    assert used == ({ENGINE: 3.0, LOOP: 0.5, "writer": -0.5, "encoder": 0.125}, 20, 0.5)
    assert (used.engine_s, used.others_s) == (3.0, 0.125)


def figures(*, engine: float, others: float, outside_ms: float = 0.0) -> dict[str, float]:
    return {"engine_cpu_s": engine, "others_cpu_s": others, "outside_ms": outside_ms, "step_ms": 100.0}


def test_a_cost_is_what_others_take_more_in_percent_of_the_engines_time() -> None:
    without, with_it = figures(engine=3.0, others=0.1), figures(engine=5.0, others=0.18)

    assert cost_percent(with_it, without) == pytest.approx(2.0)
    assert cost_percent(without, without) == 0


def test_the_bound_takes_off_what_others_take_and_what_the_engine_waits() -> None:
    without = figures(engine=4.0, others=0.1, outside_ms=0.5)
    with_it = figures(engine=4.0, others=0.14, outside_ms=2.5)

    assert bound(with_it, without) == pytest.approx(1 - 0.01 - 0.02)


def test_no_run_begins_as_another() -> None:
    prompts = [Prompt([5, 6, 7], 4), Prompt([8, 6, 7], 9)]

    runs = [fresh(prompts, run) for run in range(3)]

    assert len({prompt.token_ids[0] for prompts in runs for prompt in prompts}) == 3
    assert all([p.num_new for p in run] == [4, 9] for run in runs)
    assert all([p.token_ids[1:] for p in run] == [[6, 7], [6, 7]] for run in runs)
