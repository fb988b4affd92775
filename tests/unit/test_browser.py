"""The browser tests find every browser that the set-up script accepts."""

import re
from pathlib import Path

import pytest

from tests.support.browser import CHROMIUM_NAMES, find_chromium

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "ensure_chromium.sh"


def test_the_names_are_those_of_the_script() -> None:
    [names] = re.findall(r"for name in (.+); do", SCRIPT.read_text(encoding="utf-8"))

    assert tuple(names.split()) == CHROMIUM_NAMES


@pytest.mark.parametrize("name", CHROMIUM_NAMES)
def test_each_name_is_found_wherever_it_lies(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / name
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert find_chromium() == str(program)


def test_no_browser_is_an_error_that_says_what_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(AssertionError, match=r"ensure_chromium.sh"):
        find_chromium()
