"""Kernels against float64 over a grid of shapes: the largest error of each case, and whether it is too large.

The cases are shared out among processes, since most of the time goes into compiling kernels. A case that
breaks the device takes its process with it: that counts against the case, and a new process does the rest.
Cases that the time does not suffice for are counted; the exit status is 1 if any case was wrong.
"""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.common import ROOT
from bench.device.kernel_cases import TOLERANCES, Case
from bench.device.kernel_grid import list_cases
from bench.device.part import Clock, Findings, Options, options_of, parser
from bench.device.shapes import QWEN3_06B
from engine.runner.arithmetic import make_arithmetic
from engine.runner.attention_choice import TRITON

_MAX_WORKERS = 8
_LOST_STATUS = 4
_LOSING_WORDS = ("CUDA error", "illegal", "launch failure")
_END_S = 15.0
"""What is left of the time when no further case is begun: one may take as long."""


def main() -> int:
    """Check the grid in several processes; or, as one of them, the cases that a file names."""
    arguments = parser(__doc__)
    arguments.add_argument(
        "--names", type=Path, metavar="FILE", help="the cases to check (default: share out)"
    )
    given = arguments.parse_args()
    options = options_of(given)
    if given.names is not None:
        return _check_cases(options, json.loads(given.names.read_text(encoding="utf-8")))
    return _share_out(options)


# ---------------------------------------------------------------- one process


def _check_cases(options: Options, names: list[str]) -> int:
    """Write a line before and after each case; return the exit status."""
    clock, device = Clock(options.limit_s), torch.device(options.device)
    cases = {case.name: case for case in list_cases(is_tiny=options.is_tiny)}
    with options.json.open("a", encoding="utf-8", buffering=1) as lines, torch.inference_mode():
        for name in names:
            if clock.left_s <= _end_s(options):
                return 0
            lines.write(json.dumps({"begun": name}) + "\n")
            result = run_case(cases[name], device)
            lines.write(json.dumps({"case": name, **result}) + "\n")
            if result.get("is_lost"):
                return _LOST_STATUS
    return 0


def run_case(case: Case, device: torch.device) -> dict[str, Any]:
    """Return the error of a case and whether it is small enough; of one that fails, how.

    `is_lost`: the device can do nothing more for this process.
    """
    tolerance = TOLERANCES[case.dtype]
    try:
        kernels = make_arithmetic(TRITON, QWEN3_06B, getattr(torch, case.dtype), device)
        error = case.run(kernels.attention, kernels.ops, device)
    except Exception as fault:  # noqa: BLE001 - whatever it is counts against the case
        traceback.print_exc()
        lost = {"is_lost": True} if is_lost(fault) else {}
        return {"is_right": False, "fault": describe(fault), **lost}
    # JSON has no infinity.
    return {"error": error if error < float("inf") else "not finite", "is_right": error <= tolerance}


def is_lost(fault: Exception) -> bool:
    """Whether the device can do nothing more for this process."""
    return any(words in str(fault) for words in _LOSING_WORDS) or type(fault).__name__ == "AcceleratorError"


def describe(fault: BaseException) -> str:
    """Return a fault as one line of a bounded length."""
    return f"{type(fault).__name__}: {' '.join(str(fault).split())}"[:400]


def _end_s(options: Options) -> float:
    return _END_S if options.is_cuda else 0.0


# ---------------------------------------------------------------- all processes


@dataclass
class Worker:
    """A process, the cases that it was given, and where it writes what it finds."""

    process: subprocess.Popen[bytes]
    names: list[str]
    path: Path


def read_lines(path: Path) -> tuple[dict[str, dict[str, Any]], str | None]:
    """Return what a process has found, by case, and the case that it had begun and not ended."""
    found: dict[str, dict[str, Any]] = {}
    begun: str | None = None
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            break  # cut off in the middle
        if "begun" in entry:
            begun = entry["begun"]
        else:
            found[entry.pop("case")] = entry
            begun = None
    return found, begun


def _share_out(options: Options) -> int:
    clock, findings = Clock(options.limit_s), Findings(options.json)
    cases = list_cases(is_tiny=options.is_tiny)
    names = [case.name for case in cases]
    number = 1 if not options.is_cuda else max(1, min(_MAX_WORKERS, (os.cpu_count() or 1) // 2))
    findings.put("num_cases", len(names))
    results = _run_workers(options, clock, share_cases(cases, number), findings)
    summary = summarise(cases, results)
    findings.values |= summary
    findings.write()
    print(json.dumps({key: value for key, value in summary.items() if key != "cases"}, indent=1))
    return 1 if summary["num_wrong"] or not results else 0


def share_cases(cases: list[Case], number: int) -> list[list[str]]:
    """Return the names of cases for so many processes; those of the same kernels go to the same one."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for case in cases:
        fields = (getattr(case, name, None) for name in ("dtype", "heads", "block_size"))
        groups.setdefault((type(case), *fields), []).append(case.name)
    shares: list[list[str]] = [[] for _ in range(number)]
    for index, group in enumerate(groups.values()):
        shares[index % number] += group
    return shares


def _run_workers(
    options: Options, clock: Clock, shares: list[list[str]], findings: Findings
) -> dict[str, dict[str, Any]]:
    """Return what all processes found; start one again for what a broken one has left."""
    results: dict[str, dict[str, Any]] = {}
    counter = iter(range(10_000))

    def start(names: list[str]) -> Worker:
        return _start(options, clock, names, next(counter))

    workers = [start(names) for names in shares if names]
    while workers:
        worker = workers.pop(0)
        try:
            status: int | None = worker.process.wait(clock.left_s)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()
            status = None
        found, begun = read_lines(worker.path)
        if begun is not None:
            fault = "did not end in time" if status is None else f"its process ended with {status}"
            found[begun] = {"is_right": False, "fault": fault}
        rest = [name for name in worker.names if name not in found]
        if status not in (0, None) and not found:  # it did not get to any: nor would another one
            fault = f"its process ended with {status} before it"
            found = {name: {"is_right": False, "fault": fault} for name in rest}
        elif status not in (0, None) and rest and clock.left_s > _end_s(options):
            workers.append(start(rest))
        results |= found
        findings.put("num_checked", len(results))
    return results


def _start(options: Options, clock: Clock, names: list[str], number: int) -> Worker:
    given = options.json.with_name(f"{options.json.stem}.{number}.names")
    path = options.json.with_name(f"{options.json.stem}.{number}.lines")
    given.write_text(json.dumps(names), encoding="utf-8")
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "bench.device.kernels", "--device", options.device]
    command += ["--names", str(given), "--json", str(path), "--limit-s", str(clock.left_s)]
    if options.is_tiny:
        command.append("--tiny")
    return Worker(subprocess.Popen(command, cwd=ROOT), names, path)


def summarise(cases: list[Case], results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return counts, the largest error of each type, and all cases; the wrong ones first."""
    checked = [case for case in cases if case.name in results]
    wrong = [case.name for case in checked if not results[case.name]["is_right"]]
    largest: dict[str, float] = {}
    for case in checked:
        error = results[case.name].get("error")
        if isinstance(error, float):
            largest[case.dtype] = max(error, largest.get(case.dtype, 0.0))
    order: Callable[[str], bool] = lambda name: bool(results[name]["is_right"])  # noqa: E731
    return {
        "num_checked": len(checked),
        "num_wrong": len(wrong),
        "num_left_out": len(cases) - len(checked),
        "tolerances": TOLERANCES,
        "largest_errors": largest,
        "wrong": wrong[:20],
        "cases": {name: results[name] for name in sorted(results, key=order)},
    }


if __name__ == "__main__":
    sys.exit(main())
