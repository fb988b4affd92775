import argparse
import json
import sys
from pathlib import Path

import pytest

from bench.device import __main__ as check
from bench.device.part import NO_DEVICE_STATUS

pytestmark = pytest.mark.unit

WRITE = "import json, sys; json.dump({'x': 1}, open(sys.argv[1], 'w')); print('said')"
SCRIPTS = {
    "good": WRITE,
    "late": WRITE,
    "bad": f"{WRITE}; sys.exit(1)",
    "crashes": "import os; os.abort()",
    "hangs": f"{WRITE}; import threading; threading.Event().wait()",
    "leaves": """
import json, subprocess, sys, threading
child = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
json.dump({"child": child.pid}, open(sys.argv[1], "w"))
threading.Event().wait()
""",
    "bare": f"sys = __import__('sys'); sys.exit({NO_DEVICE_STATUS})",
}


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def command_of(
        part: check.Part, _arguments: argparse.Namespace, found: Path, _limit_s: float
    ) -> list[str]:
        return [sys.executable, "-c", SCRIPTS[part.name], str(found)]

    monkeypatch.setattr(check, "command_of", command_of)
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    return tmp_path / "out"


def run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *stages: list[str], words: tuple[str, ...] = ()
) -> int:
    def part(name: str) -> check.Part:
        return check.Part(
            name,
            1 if name in ("hangs", "leaves") else 20,
            ("throughput",) if name == "late" else ("quick",),
        )

    monkeypatch.setattr(check, "STAGES", [[part(name) for name in stage] for stage in stages])
    work = tmp_path / "work"
    work.mkdir()
    return check.Check(check.parse(["--device", "cpu", *words]), work).run()


def statuses(out: Path) -> dict[str, str]:
    found = json.loads((out / check.RESULTS).read_text(encoding="utf-8"))
    return {name: part["status"] for name, part in found["parts"].items()}


def test_parts_that_fail_hide_no_others(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, tmp_path, ["crashes", "bad"], ["hangs"], ["good"], ["late"]) == 1
    assert statuses(out) == {
        "crashes": "failed with -6",
        "bad": "failed with 1",
        "hangs": "cut at its limit",
        "good": "done",
        "late": "done",
    }
    found = json.loads((out / check.RESULTS).read_text(encoding="utf-8"))
    assert all(found["parts"][name]["found"] == {"x": 1} for name in ("bad", "hangs", "good", "late"))
    assert found["parts"]["crashes"]["found"] == {}
    assert "==== good: done ====\nsaid" in (out / check.LOG).read_text(encoding="utf-8")
    assert "cut at its limit" in capsys.readouterr().out


def test_a_part_that_is_cut_leaves_no_process(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(monkeypatch, tmp_path, ["leaves"]) == 1
    found = json.loads((out / check.RESULTS).read_text(encoding="utf-8"))
    stat = Path(f"/proc/{found['parts']['leaves']['found']['child']}/stat")
    # It is gone, or at least dead and not yet collected by whoever inherits it.
    assert not stat.exists() or stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z"


def test_all_done_is_success(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, tmp_path, ["good"], ["late"]) == 0
    assert sorted(path.name for path in out.iterdir()) == [check.RESULTS, check.LOG]


def test_only_what_is_asked_for_runs(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, tmp_path, ["good", "bad"], ["late"], words=("throughput",)) == 0
    assert statuses(out) == {"late": "done"}


def test_nothing_more_is_begun_without_a_device(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, tmp_path, ["bare"], ["good"]) == 2
    assert statuses(out) == {"bare": "failed with 3"}
    assert "no CUDA device" in capsys.readouterr().out


def test_parts_for_which_no_time_is_left_are_missed(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, tmp_path, ["good"], words=("--limit-s", "1")) == 1
    assert statuses(out) == {}
    assert "1 parts were not begun" in capsys.readouterr().out


def test_a_part_is_told_how_to_run() -> None:
    arguments = check.parse(["quick", "--device", "cpu", "--tiny"])
    part = check.Part("some", 60.0, ("quick",), "kernels", "--some")
    command = check.command_of(part, arguments, Path("k.json"), 50.0)
    assert command[1:] == [
        "-m", "bench.device.kernels", "--device", "cpu", "--json", "k.json", "--limit-s", "50.0", "--some",
        "--tiny",
    ]  # fmt: skip


def test_every_run_fits_into_its_time() -> None:
    def longest(run_name: str) -> float:
        return sum(
            max((part.limit_s for part in stage if run_name in (*part.runs, "all")), default=0)
            for stage in check.STAGES
        )

    assert longest("all") <= check.parse([]).limit_s <= 480
    assert longest("quick") <= 300
    assert longest("throughput") <= 300
