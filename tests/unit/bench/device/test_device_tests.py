from pathlib import Path

import pytest

from bench.device import device_tests
from bench.device.part import Options, read_json

pytestmark = pytest.mark.unit

FILES = {
    "test_good.py": "def test_a(): pass\ndef test_b(): pass\n",
    "test_bad.py": """
import pytest
def test_a(): assert 1 == 2, 'so it is'
@pytest.mark.skip
def test_b(): pass
""",
    "test_lost.py": "import os\ndef test_a(): pass\ndef test_b(): os._exit(7)\n",
    "test_broken.py": "import no_such_module\n",
}


def run(folder: Path, names: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict[str, object]]:
    tests = folder / "device"
    tests.mkdir()
    for name in names:
        (tests / name).write_text(FILES[name], encoding="utf-8")
    monkeypatch.setattr(device_tests, "_FOLDER", tests)
    options = Options("cpu", is_tiny=True, json=folder / "found.json", limit_s=60)
    return device_tests.run_all(options, is_alone=False), read_json(options.json)


def test_files_that_pass_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, found = run(tmp_path, ["test_good.py"], monkeypatch)
    assert (status, found["passed"], found["failed"], found["skipped"]) == (0, 2, 0, 0)


def test_a_file_that_fails_or_ends_its_process_takes_no_other_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, found = run(tmp_path, list(FILES), monkeypatch)
    assert (status, found["passed"], found["failed"], found["skipped"]) == (1, 3, 4, 1)
    tests = found["tests"]
    assert isinstance(tests, dict)
    why = {name: test.get("why", "") for name, test in tests.items()}
    assert "so it is" in why["test_bad.py::test_a"]
    assert why["test_lost.py::test_b"] == "it did not end"
    assert why["test_lost.py"] == "the process ended with 7"
    assert why["test_broken.py"] == "the process ended with 2"
    assert [test["outcome"] for test in tests.values()][:4] == ["failed"] * 4


def test_files_that_need_the_gpu_to_themselves_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_tests, "_ALONE", ("test_bad.py",))
    status, found = run(tmp_path, ["test_good.py", "test_bad.py"], monkeypatch)
    assert (status, found["passed"], found["failed"]) == (0, 2, 0)
    options = Options("cpu", is_tiny=True, json=tmp_path / "alone.json", limit_s=60)
    assert device_tests.run_all(options, is_alone=True) == 1
    assert read_json(options.json)["skipped"] == 1


def test_no_test_at_all_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(tmp_path, [], monkeypatch)[0] == 1
