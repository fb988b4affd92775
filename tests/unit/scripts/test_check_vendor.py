import runpy
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
VENDOR = ROOT / "static" / "vendor"
HTMX = "htmx-4.0.1/htmx.min.js"
check = runpy.run_path(str(ROOT / "scripts" / "check_vendor.py"))["check"]


@pytest.fixture
def vendor(tmp_path: Path) -> Path:
    return Path(shutil.copytree(VENDOR, tmp_path / "vendor"))


def test_vendored_files_have_the_listed_sums() -> None:
    assert check(VENDOR) == []


def test_changed_file_is_reported(vendor: Path) -> None:
    with (vendor / HTMX).open("ab") as file:
        file.write(b" ")

    assert check(vendor) == [f"{HTMX}: SHA-256 differs from vendor.toml"]


def test_missing_file_is_reported(vendor: Path) -> None:
    (vendor / HTMX).unlink()

    assert check(vendor) == [f"{HTMX}: missing"]


def test_file_that_is_not_listed_is_reported(vendor: Path) -> None:
    (vendor / "extra.js").touch()

    assert check(vendor) == ["extra.js: not listed in vendor.toml"]
