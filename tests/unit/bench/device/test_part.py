import json
from pathlib import Path

import pytest

from bench.device import ceilings
from bench.device.ceilings import Ceilings, ceilings_of
from bench.device.part import CEILINGS_FILE, Clock, Findings, Options, read_json

pytestmark = pytest.mark.unit


def make_options(folder: Path) -> Options:
    return Options("cpu", is_tiny=True, json=folder / "some.json", limit_s=10)


def test_findings_are_on_disk_as_soon_as_they_are_known(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    findings = Findings(path)
    findings.put("a", 1)
    assert read_json(path) == {"a": 1}
    findings.put("b", [1.5, None])
    findings.put("a", 2)
    assert read_json(path) == {"a": 2, "b": [1.5, None]}
    assert list(tmp_path.iterdir()) == [path]


def test_findings_that_cannot_be_written_leave_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    findings = Findings(path)
    findings.put("a", 1)
    with pytest.raises(TypeError):
        findings.put("b", object())
    assert read_json(path) == {"a": 1}


def test_a_file_that_is_not_there_has_nothing(tmp_path: Path) -> None:
    assert read_json(tmp_path / "missing.json") == {}


def test_a_clock_ends_at_nothing() -> None:
    assert 9 < Clock(10).left_s <= 10
    assert Clock(-1).left_s == 0


def test_ceilings_are_those_of_the_run_or_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ceilings, "measure", lambda _: Ceilings(1.0, 2.0))
    assert ceilings_of(make_options(tmp_path)) == Ceilings(1.0, 2.0)
    found = {"copy_gb_s": 4300.0, "matmul_tflops": 780.0, "machine": {}}
    (tmp_path / CEILINGS_FILE).write_text(json.dumps(found), encoding="utf-8")
    assert ceilings_of(make_options(tmp_path)) == Ceilings(4300.0, 780.0)


def test_measured_ceilings_count_bytes_and_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ceilings, "measure_s", lambda *_args, **_kwargs: 0.5)
    measured = ceilings.measure(make_options(tmp_path))
    assert measured == Ceilings(2 * 4 * (1 << 22) / 0.5 / 1e9, 2 * 256**3 / 0.5 / 1e12)
