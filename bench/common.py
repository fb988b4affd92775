"""What all benchmarks share: the machine's yardstick, who else uses it, percentiles, tables.

Imports nothing but the standard library, so that other programs' Python can run what is built on it.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
"""The checkout; the place to start `python -m bench.…` from."""

Figures = dict[str, float]
"""What one run gave, by name; the name ends in the unit."""

MACHINE_FIGURES = ("other_cores", "stolen_cores")
"""Figures that say something about the machine, not about what was measured."""

OTHERS_LIMIT = 0.1
"""Cores used by other processes above which figures are marked as disturbed."""

_QUIET_S = 1.0
_THREAD_VARIABLES = ("OMP_", "KMP_", "GOMP_", "LD_PRELOAD", "MKL_", "OPENBLAS_")


def percentile(values: Iterable[float], percent: float) -> float:
    """Return the percentile by linear interpolation."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@dataclass(frozen=True)
class Yardstick:
    """What the machine could do at one moment; GFLOP/s, and GB/s read and written."""

    fp32_gflops: float
    bf16_gflops: float
    copy_gb_s: float
    threads: int

    def __str__(self) -> str:
        """Show it as one line."""
        return (
            f"yardstick: fp32 matmul {self.fp32_gflops:.0f} GFLOP/s, bf16 {self.bf16_gflops:.0f}, "
            f"copy {self.copy_gb_s:.0f} GB/s, {self.threads} threads"
        )


def yardstick(threads: int | None = None) -> Yardstick:
    """Measure the machine in a process of its own."""
    command = [sys.executable, "-m", "bench.yardstick"]
    if threads is not None:
        command += ["--threads", str(threads)]
    environment = {name: text for name, text in os.environ.items() if not name.startswith(_THREAD_VARIABLES)}
    output = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    return Yardstick(**json.loads(output.stdout))


def process_tree(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    found = [pid]
    for parent in found:  # grows while it is read
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            found += [int(child) for child in _read(children).split()]
    return found


def peak_memory_mb(pid: int | None = None) -> float:
    """Return the sum of the largest resident sizes of a process and its descendants, in 10^6 bytes."""
    total_kib = 0
    for process in process_tree(pid or os.getpid()):
        for line in _read(Path(f"/proc/{process}/status")).splitlines():
            if line.startswith("VmHWM:"):
                total_kib += int(line.split()[1])
    return total_kib * 1024 / 1e6


class Activity:
    """Watches, from when it is built, how many cores other processes use."""

    def __init__(self, *trees: int) -> None:
        """Count the processes below `trees` as ours (by default this one and what it starts)."""
        self._trees = trees or (os.getpid(),)
        self._started = self._snapshot()

    def others(self) -> Figures:
        """Return `other_cores` (used by processes that are not ours), `stolen_cores` (by other machines)."""
        ended = self._snapshot()
        seconds, busy, own, stolen = (b - a for a, b in zip(self._started, ended, strict=True))
        ticks = seconds * os.sysconf("SC_CLK_TCK")
        return {"other_cores": max(0.0, (busy - own) / ticks), "stolen_cores": stolen / ticks}

    def own_cpu_s(self) -> float:
        """Return how many seconds of CPU time our processes, those of them that still live, have used."""
        return (self._snapshot()[2] - self._started[2]) / os.sysconf("SC_CLK_TCK")

    def _snapshot(self) -> tuple[float, float, float, float]:
        fields = [int(field) for field in _read(Path("/proc/stat")).split("\n", 1)[0].split()[1:]]
        idle, stolen = fields[3] + fields[4], fields[7]
        busy = sum(fields[:8]) - idle - stolen
        pids = {pid for tree in self._trees for pid in process_tree(tree)}
        own = sum(_cpu_ticks(pid) for pid in pids)
        return time.perf_counter(), busy, own, stolen


def add_quiet_option(parser: argparse.ArgumentParser) -> None:
    """Let a command take `--quiet-wait`."""
    parser.add_argument(
        "--quiet-wait",
        type=float,
        default=0.0,
        metavar="S",
        help="wait up to so many seconds before each run until other processes are idle (default: 0)",
    )


def wait_for_quiet(seconds: float) -> None:
    """Return when other processes use next to nothing, or after so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        activity = Activity()
        time.sleep(_QUIET_S)
        if activity.others()["other_cores"] < OTHERS_LIMIT:
            return


def is_disturbed(run: Figures) -> bool:
    """Whether others took a noticeable part of the machine during a run."""
    return max(run.get(name, 0.0) for name in MACHINE_FIGURES) > OTHERS_LIMIT


def _cpu_ticks(pid: int) -> int:
    """Return the CPU time of a process and of its ended children, 0 if it is gone."""
    after_name = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return sum(int(field) for field in after_name[11:15])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # processes come and go
        return ""


def end_on_signal() -> None:
    """Let SIGTERM end this process as an error would, so that it ends what it has started."""

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def versions() -> str:
    """Return the versions that matter for a figure."""
    try:
        torch_version = version("torch")
    except PackageNotFoundError:
        torch_version = "not installed"
    return f"Python {platform.python_version()}, torch {torch_version}, {platform.machine()}"


def medians(runs: list[Figures]) -> Figures:
    """Return the median of each figure that all runs have."""
    names = [name for name in runs[0] if all(name in run for run in runs)]
    return {name: statistics.median(run[name] for run in runs) for name in names}


def print_table(header: list[str], rows: list[list[object]]) -> None:
    """Print a Markdown table."""
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for row in rows:
        print(
            "| " + " | ".join(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row) + " |"
        )


def print_figures(title: str, runs: list[Figures]) -> None:
    """Print median, smallest and largest value of each figure, and which runs others disturbed."""
    rows: list[list[object]] = []
    for name, median in medians(runs).items():
        values = [run[name] for run in runs]
        rows.append([name.replace("_", " "), median, min(values), max(values)])
    print_table([title, "median", "min", "max"], rows)
    print_disturbed(title, runs)


def print_disturbed(title: str, runs: list[Figures]) -> None:
    """Say in which runs other processes took a noticeable part of the machine."""
    disturbed = [run for run in runs if is_disturbed(run)]
    if disturbed:
        most = max(run.get(name, 0.0) for run in disturbed for name in MACHINE_FIGURES)
        print(f"{title}: others used up to {most:.2f} cores during {len(disturbed)} of {len(runs)} runs.")


def write_json(path: Path | None, report: Mapping[str, Any]) -> None:
    """Write a report to a file, if one is asked for; yardsticks may be in it."""
    if path is not None:
        text = json.dumps(report, indent=1, default=asdict)
        path.write_text(text + "\n", encoding="utf-8")
