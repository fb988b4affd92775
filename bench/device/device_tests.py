"""The tests marked `device`, each file in a process of its own: a GPU that is lost is lost to one of them.

With `--alone` those that look at all of the GPU's memory, one after the other; else all others side by side.
Results are on disk after each test. The exit status is 1 if any failed, or if a process ended by itself.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from bench.common import ROOT
from bench.device.part import Clock, Findings, Options, options_of, parser, read_json

_FOLDER = ROOT / "tests" / "device"
_ALONE = ("test_loading.py",)
_TEST_LIMIT_S = 60
_SHOWN_CHARS = 600
_COUNTED = ("passed", "failed", "skipped")


class Recorder:
    """A plugin of pytest that writes down each result."""

    def __init__(self, findings: Findings) -> None:
        """Begin with no results."""
        self._findings = findings
        findings.put("tests", {})

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the result of one phase of a test: setting up, the call, tearing down."""
        tests: dict[str, Any] = self._findings.values["tests"]
        known = tests.setdefault(
            report.nodeid, {"outcome": "failed", "why": "it did not end", "seconds": 0.0}
        )
        known["seconds"] = round(known["seconds"] + report.duration, 3)
        if report.outcome != "passed":
            known |= {"outcome": report.outcome, "why": str(report.longrepr)[-_SHOWN_CHARS:]}
        elif report.when == "call":
            known["outcome"] = "passed"
            del known["why"]
        self._findings.write()


def run_file(options: Options, path: Path) -> int:
    """Run one file of tests in this process; return pytest's exit status."""
    arguments = ["-c", "/dev/null", "--rootdir", str(ROOT), "--noconftest", "--import-mode=importlib"]
    # The project's own settings name plugins that such a machine need not have.
    arguments += ["-p", "no:cacheprovider", "-o", "markers=device: wants an accelerator"]
    arguments += ["-o", f"pythonpath={ROOT}", "-o", "consider_namespace_packages=true"]
    arguments += ["-o", f"faulthandler_timeout={_TEST_LIMIT_S}", "-q", "-ra"]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # whatever else may be installed
    if find_spec("pytest_timeout") is not None:
        arguments += ["-p", "pytest_timeout", "-o", f"timeout={_TEST_LIMIT_S}"]
    return int(pytest.main([*arguments, str(path)], plugins=[Recorder(Findings(options.json))]))


@dataclass
class _Running:
    process: subprocess.Popen[bytes]
    name: str
    json: Path


def run_all(options: Options, *, is_alone: bool) -> int:
    """Run the files that need the GPU to themselves, or all others; return the exit status."""
    clock, findings = Clock(options.limit_s), Findings(options.json)
    paths = [path for path in sorted(_FOLDER.glob("test_*.py")) if (path.name in _ALONE) == is_alone]
    tests: dict[str, Any] = {}
    findings.values |= summarise(tests)
    starting = (_start(options, clock, path) for path in paths)
    for each in starting if is_alone else list(starting):
        try:
            status = each.process.wait(clock.left_s)
        except subprocess.TimeoutExpired:
            each.process.kill()
            status = each.process.wait()
        for name, test in read_json(each.json).get("tests", {}).items():
            tests[f"{each.name}::{name.partition('::')[2]}"] = test
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            tests[each.name] = {"outcome": "failed", "why": f"the process ended with {status}"}
        findings.values |= summarise(tests)
        findings.write()
    print({name: findings.values[name] for name in _COUNTED})
    return 1 if findings.values["failed"] or not findings.values["passed"] + findings.values["skipped"] else 0


def summarise(tests: dict[str, Any]) -> dict[str, Any]:
    """Return how many tests had which outcome, and all of them, those that failed first."""
    outcomes = [test["outcome"] for test in tests.values()]
    order = sorted(tests, key=lambda name: tests[name]["outcome"] != "failed")
    counts: dict[str, Any] = {outcome: outcomes.count(outcome) for outcome in _COUNTED}
    return {**counts, "tests": {name: tests[name] for name in order}}


def _start(options: Options, clock: Clock, path: Path) -> _Running:
    found = options.json.with_name(f"{options.json.stem}.{path.stem}.json")
    found.unlink(missing_ok=True)
    command = [sys.executable, "-m", "bench.device.device_tests", "--device", options.device]
    command += ["--file", str(path), "--json", str(found), "--limit-s", str(clock.left_s)]
    return _Running(subprocess.Popen(command, cwd=ROOT), path.name, found)


def main() -> int:
    """Run all files, or, as one of the processes, one of them."""
    arguments = parser(__doc__)
    arguments.add_argument("--alone", action="store_true", help="those that need the GPU to themselves")
    arguments.add_argument("--file", type=Path, help="one file of tests (default: all)")
    given = arguments.parse_args()
    options = options_of(given)
    if given.file is not None:
        return run_file(options, given.file)
    return run_all(options, is_alone=given.alone)


if __name__ == "__main__":
    sys.exit(main())
