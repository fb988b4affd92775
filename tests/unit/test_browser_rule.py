"""A skipped browser test fails the run unless somebody said that there is no browser."""

import os
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
SKIPPING = """
import pytest

@pytest.mark.browser
def test_picture():
    pytest.skip("no chromium")

def test_other():
    pass
"""


def run_suite(folder: Path, source: str, no_browser: str | None = None) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST.read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n    browser: needs a browser\n", encoding="utf-8"
    )
    (folder / "test_sample.py").write_text(source, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "PAGEGLASS_NO_BROWSER"}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    if no_browser is not None:
        environment["PAGEGLASS_NO_BROWSER"] = no_browser
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_skipped_browser_test_fails_the_run(tmp_path: Path) -> None:
    result = run_suite(tmp_path, SKIPPING)

    assert result.returncode == 1
    assert "1 browser test(s) were skipped, first test_sample.py::test_picture" in result.stdout


def test_skip_is_allowed_when_no_browser_is_wanted(tmp_path: Path) -> None:
    result = run_suite(tmp_path, SKIPPING, no_browser="1")

    assert result.returncode == 0, result.stdout


def test_other_skips_do_not_matter(tmp_path: Path) -> None:
    source = "import pytest\n\ndef test_it():\n    pytest.skip('other')\n"

    assert run_suite(tmp_path, source).returncode == 0


def test_browser_tests_do_not_start_when_no_browser_is_wanted(tmp_path: Path) -> None:
    source = SKIPPING.replace('pytest.skip("no chromium")', "raise RuntimeError")

    assert run_suite(tmp_path, source, no_browser="1").returncode == 0
