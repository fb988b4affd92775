"""`pageglass load` as a process against a real server with the default model."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.server import REPOSITORY, ServerProcess, run_forked

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--num-blocks", "256", "--max-model-len", "512", is_forked=True) as process:
        yield process


def run(server: ServerProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_forked("load", "--url", server.url, *arguments, timeout_s=2 * DEADLINE_S)


def summary(output: str) -> dict[str, str]:
    return {line[:22].strip(): line[22:] for line in output.splitlines()}


def engine_state(server: ServerProcess) -> dict[str, Any]:
    state: dict[str, Any] = httpx.get(f"{server.url}/api/engine/state").json()
    return state


def test_trace_is_pushed_with_its_lengths_and_its_sharing(server: ServerProcess) -> None:
    before = engine_state(server)["totals"]

    results = [run(server, "--trace", "mooncake", "--rows", "6", "--speed", "0") for _ in range(2)]

    totals = engine_state(server)["totals"]
    for result in results:
        assert result.returncode == 0, result.stderr
        assert summary(result.stdout)["finished"] == "6"
        assert summary(result.stdout)["output"].startswith("72 tokens in ")
    assert totals["num_output_tokens"] - before["num_output_tokens"] == 2 * 72
    assert totals["num_finished"] - before["num_finished"] == 12
    assert totals["num_hit_tokens"] > before["num_hit_tokens"]


def test_rows_over_the_context_are_skipped(server: ServerProcess) -> None:
    result = run(server, "--trace", "mooncake", "--rows", "3", "--scale", "4", "--speed", "0")

    assert result.returncode == 0, result.stderr
    assert summary(result.stdout)["skipped"] == "3  (over the context)"
    assert summary(result.stdout)["finished"] == "0"


def test_prompts_are_answered_turn_by_turn(server: ServerProcess) -> None:
    result = run(server, "--prompts", "mt-bench", "--rows", "2", "--max-tokens", "8")

    assert result.returncode == 0, result.stderr
    assert summary(result.stdout)["finished"] == "4"


def latest_priorities(server: ServerProcess, count: int) -> list[int]:
    items = httpx.get(f"{server.url}/api/requests?limit={count}").json()["items"]
    return sorted(item["priority"] for item in items)


def test_priorities_are_reported_by_class_and_unknown_ones_refused(server: ServerProcess) -> None:
    options = ("--trace", "mooncake", "--rows", "4", "--speed", "0")
    result = run(server, *options, "--priority", "premium=0.5,bulk=0.25")

    assert result.returncode == 0, result.stderr
    lines = summary(result.stdout)
    assert {name: lines[name].split()[0] for name in ("premium", "bulk", "no class")} == {
        "premium": "2",
        "bulk": "1",
        "no class": "1",
    }
    assert "first token mean" in lines["premium"]
    deadline = time.monotonic() + DEADLINE_S  # the history follows within a second
    while latest_priorities(server, 4) != [-10, -10, 0, 10]:
        assert time.monotonic() < deadline, latest_priorities(server, 4)
    refused = run(server, *options, "--priority", "royal=1")
    assert refused.returncode == 2
    assert "the server has no class royal (it has: premium, standard, bulk)." in refused.stderr


def test_interrupt_ends_with_the_summary_and_frees_the_server(server: ServerProcess) -> None:
    options = ("--trace", "azure-conv", "--rows", "40", "--speed", "0", "--scale", "4")
    process = subprocess.Popen(
        [sys.executable, "-m", "app", "load", "--url", server.url, *options],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        line = next(line for line in process.stderr if re.match(r"open [1-9]", line))
        assert " of 40, " in line
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.wait()

    assert process.returncode == 130
    assert int(summary(output)["stopped"].split()[0]) > 0
    deadline = time.monotonic() + DEADLINE_S
    while (state := engine_state(server))["running"] or state["waiting"] or state["counts"]["used"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
