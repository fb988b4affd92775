"""Rules for the whole suite: markers by folder, and no silently missing browser."""

import importlib
import os
import shutil
from pathlib import Path

import pytest

from app.db.database import DATABASE_FILE
from app.db.migrate import upgrade_now

# As the server does (app/engine_loading.py): torch's threads must not spin against a browser's or a server's.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")


def _may_have_gpu() -> bool:
    """Whether it is worth to ask torch, whose import takes a second: a driver (Linux, WSL) is there."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()


def _sees_gpu() -> bool:
    return _may_have_gpu() and importlib.import_module("torch").cuda.is_available()


# Triton reads it when it is imported, by whatever test comes first. With a GPU, its kernels are tested there.
if not _sees_gpu():
    os.environ.setdefault("TRITON_INTERPRET", "1")

_TESTS = Path(__file__).resolve().parent
_MARKER_OF_FOLDER = {
    "unit": "unit",
    "property": "unit",
    "integration": "integration",
    "e2e": "e2e",
    "device": "device",
}
_NO_BROWSER_VARIABLE = "PAGEGLASS_NO_BROWSER"
_BROWSER_FOLDER = "e2e/browser"


@pytest.fixture(scope="session")
def _empty_history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A history file of the newest schema with nothing in it: making one takes a fifth of a second."""
    path = tmp_path_factory.mktemp("history") / DATABASE_FILE
    upgrade_now(path)
    return path


@pytest.fixture(autouse=True)
def _own_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Servers that a test starts in its process keep their history in a folder of the test's own."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    if request.node.get_closest_marker("integration"):
        folder = tmp_path / "data" / "pageglass"
        folder.mkdir(parents=True)
        shutil.copy(request.getfixturevalue("_empty_history"), folder / DATABASE_FILE)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_BrowserRule(), "pageglass-browser-rule")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip_browser = pytest.mark.skip(reason=f"{_NO_BROWSER_VARIABLE}=1")
    for item in items:
        folder = item.path.relative_to(_TESTS).parts[0] if item.path.is_relative_to(_TESTS) else ""
        if folder in _MARKER_OF_FOLDER:
            item.add_marker(_MARKER_OF_FOLDER[folder])
        if _may_lack_browser() and item.get_closest_marker("browser"):
            item.add_marker(skip_browser)


def _may_lack_browser() -> bool:
    return os.environ.get(_NO_BROWSER_VARIABLE) == "1"


class _BrowserRule:
    """Fails a run in which a browser test was skipped: a picture nobody looked at proves nothing."""

    def __init__(self) -> None:
        self._browser_tests: set[str] = set()
        self._skipped: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._browser_tests = {item.nodeid for item in session.items if item.get_closest_marker("browser")}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped and _BROWSER_FOLDER in report.nodeid:
            self._skipped.append(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail") and report.nodeid in self._browser_tests:
            self._skipped.append(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self._is_broken() and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._is_broken():
            terminalreporter.write_line(
                f"FAILED: {len(self._skipped)} browser test(s) were skipped, first {self._skipped[0]}. "
                f"Install chromium, or say that none is wanted with {_NO_BROWSER_VARIABLE}=1.",
                red=True,
            )

    def _is_broken(self) -> bool:
        return bool(self._skipped) and not _may_lack_browser()
