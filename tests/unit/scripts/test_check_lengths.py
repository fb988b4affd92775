import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
check = runpy.run_path(str(ROOT / "scripts" / "check_lengths.py"))["check"]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def function(num_lines: int) -> str:
    return "def long_one():\n" + "    x = 1\n" * (num_lines - 1)


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("engine/a.py", 400),
        ("static/js/a.js", 400),
        ("engine/a.h", 400),
        ("engine/a.cpp", 400),
        ("tests/a.py", 500),
    ],
)
def test_file_may_be_as_long_as_the_limit_and_no_longer(tmp_path: Path, name: str, limit: int) -> None:
    write(tmp_path / name, "#\n" * limit)
    assert check(tmp_path) == []

    write(tmp_path / name, "#\n" * (limit + 1))
    assert check(tmp_path) == [f"{name}: {limit + 1} lines, allowed are {limit}"]


def test_function_over_fifty_lines_is_named(tmp_path: Path) -> None:
    write(tmp_path / "app" / "a.py", function(50))
    assert check(tmp_path) == []

    write(tmp_path / "app" / "a.py", function(51))
    assert check(tmp_path) == ["app/a.py:1: long_one has 51 lines, allowed are 50"]


def test_vendored_files_are_not_measured(tmp_path: Path) -> None:
    write(tmp_path / "static" / "vendor" / "a.js", "//\n" * 1000)

    assert check(tmp_path) == []
