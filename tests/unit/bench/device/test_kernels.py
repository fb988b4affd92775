import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.device import kernels
from bench.device.kernel_cases import AttentionCase
from bench.device.kernel_grid import list_cases
from bench.device.kernels import Worker, read_lines, share_cases, summarise
from bench.device.part import Clock, Findings, Options

pytestmark = pytest.mark.unit

SCRIPT = """
import json, os, sys
path, names = sys.argv[1], sys.argv[2:]
with open(path, "a", buffering=1) as lines:
    for name in names:
        if name == "never begins":
            sys.exit(5)
        lines.write(json.dumps({"begun": name}) + "\\n")
        if name == "breaks":
            os._exit(9)
        if name == "hangs":
            sys.stdin.read()
        if name == "loses":
            fault = {"is_right": False, "fault": "RuntimeError: CUDA error", "is_lost": True}
            lines.write(json.dumps({"case": name, **fault}) + "\\n")
            sys.exit(4)
        lines.write(json.dumps({"case": name, "error": 0.5, "is_right": name != "wrong"}) + "\\n")
"""


def make_options(folder: Path) -> Options:
    return Options("cpu", is_tiny=True, json=folder / "kernels.json", limit_s=20)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Worker]]:
    """Processes that pretend to check; they wait for an input that never comes if they have to hang."""
    workers: list[Worker] = []

    def start(options: Options, _clock: Clock, names: list[str], number: int) -> Worker:
        path = options.json.with_name(f"{number}.lines")
        command = [sys.executable, "-c", SCRIPT, str(path), *names]
        workers.append(Worker(subprocess.Popen(command, stdin=subprocess.PIPE), names, path))
        return workers[-1]

    monkeypatch.setattr(kernels, "_start", start)
    yield workers
    for worker in workers:
        assert worker.process.stdin is not None
        worker.process.stdin.close()


def run(folder: Path, shares: list[list[str]], limit_s: float = 20) -> dict[str, dict[str, object]]:
    options = make_options(folder)
    return kernels._run_workers(options, Clock(limit_s), shares, Findings(options.json))


def test_all_cases_of_all_processes_are_found(started: list[Worker], tmp_path: Path) -> None:
    found = run(tmp_path, [["a", "wrong"], ["b"], []])
    assert {name: entry["is_right"] for name, entry in found.items()} == {
        "a": True,
        "wrong": False,
        "b": True,
    }
    assert len(started) == 2


def test_a_case_that_ends_its_process_is_wrong_and_the_others_are_checked(
    started: list[Worker], tmp_path: Path
) -> None:
    found = run(tmp_path, [["a", "breaks", "b", "c"]])
    assert found["breaks"] == {"is_right": False, "fault": "its process ended with 9"}
    assert all(found[name]["is_right"] for name in "abc")
    assert [worker.names for worker in started] == [["a", "breaks", "b", "c"], ["b", "c"]]


def test_a_case_that_never_ends_is_wrong_and_what_it_kept_from_being_checked_is_left_out(
    started: list[Worker], tmp_path: Path
) -> None:
    found = run(tmp_path, [["a", "hangs", "b"]], limit_s=3)
    assert found["hangs"] == {"is_right": False, "fault": "did not end in time"}
    assert "b" not in found
    assert started[0].process.returncode is not None


def test_a_case_that_loses_the_device_says_so_and_another_process_does_the_rest(
    started: list[Worker], tmp_path: Path
) -> None:
    found = run(tmp_path, [["a", "loses", "b"]])
    assert found["loses"] == {"is_right": False, "fault": "RuntimeError: CUDA error", "is_lost": True}
    assert found["b"]["is_right"]
    assert [worker.names for worker in started] == [["a", "loses", "b"], ["b"]]


def test_a_process_that_does_not_get_to_any_case_is_not_started_again(
    started: list[Worker], tmp_path: Path
) -> None:
    found = run(tmp_path, [["never begins", "b"]])
    assert found["b"] == {"is_right": False, "fault": "its process ended with 5 before it"}
    assert not found["never begins"]["is_right"]
    assert len(started) == 1


def test_a_line_that_was_cut_off_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    whole = [{"begun": "a"}, {"case": "a", "is_right": True}, {"begun": "b"}]
    path.write_text("\n".join(map(json.dumps, whole)) + '\n{"case": "b", "is_ri', encoding="utf-8")
    assert read_lines(path) == ({"a": {"is_right": True}}, "b")
    assert read_lines(tmp_path / "missing") == ({}, None)


def test_cases_are_shared_out_so_that_no_kernel_is_compiled_twice() -> None:
    cases = list_cases(is_tiny=False)
    shares = share_cases(cases, 8)
    assert sorted(name for share in shares for name in share) == sorted(case.name for case in cases)
    attention = [case for case in cases if isinstance(case, AttentionCase)]
    workers = {name: index for index, share in enumerate(shares) for name in share}
    loads = Counter(workers[case.name] for case in attention)  # what takes long to compile
    assert len(loads) == 8
    assert max(loads.values()) < 2 * min(loads.values())
    for key in {(case.dtype, case.heads, case.block_size) for case in attention}:
        same = [case for case in attention if (case.dtype, case.heads, case.block_size) == key]
        assert len({workers[case.name] for case in same}) == 1
    # Attention in bfloat16 comes first everywhere: it matters most if the time does not suffice.
    assert all("bfloat16" in share[0] and "heads" in share[0] for share in shares)


def test_the_summary_counts_and_puts_what_is_wrong_first() -> None:
    cases = list_cases(is_tiny=True)
    names = [case.name for case in cases]
    results: dict[str, dict[str, Any]] = {name: {"error": 0.001, "is_right": True} for name in names[:4]}
    results[names[2]] = {"error": 0.5, "is_right": False}
    results[names[3]] = {"fault": "OSError: x", "is_right": False}
    summary = summarise(cases, results)
    assert (summary["num_checked"], summary["num_wrong"], summary["num_left_out"]) == (4, 2, len(cases) - 4)
    assert list(summary["cases"])[:2] == summary["wrong"] == names[2:4]
    assert summary["largest_errors"][cases[2].dtype] == 0.5
