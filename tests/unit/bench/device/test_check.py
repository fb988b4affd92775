"""The whole device check without a GPU: everything in it runs and is right; its figures mean nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.common import ROOT
from bench.device.__main__ import STAGES

pytestmark = pytest.mark.unit


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_check_runs_without_a_gpu(tmp_path: Path) -> None:
    environment = {**os.environ, "OUT": str(tmp_path), "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", "bench/device/check.sh", "--tiny", "--device", "cpu"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "device.json").read_text(encoding="utf-8"))
    assert list(report["parts"]) == [part.name for stage in STAGES for part in stage]
    assert {part["status"] for part in report["parts"].values()} == {"done"}
    found = {name: part["found"] for name, part in report["parts"].items()}
    assert found["kernels"]["num_checked"] == found["kernels"]["num_cases"]
    assert found["device_tests"]["passed"] >= 8
    for family in ("Qwen3", "Llama"):
        (verdict,) = found["equality"][family]["ways"].values()
        assert verdict["preemptions"] > 0
        assert verdict["taken_from_run_ahead"] > 0
    assert found["breakdown"]["recording"]["cost_percent"].keys() == {"recorded", "ten pages"}
    for shape in ("Qwen3-0.6B", "Llama-3.2-1B"):
        assert all(found["bandwidth"][shape][kind] for kind in ("decode", "prefill"))
    for row in ("kernels against float64", "÷ the best of transformers", "GPU idle", "prefill"):
        assert row in done.stdout
