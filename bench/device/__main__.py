"""Runs the parts of the device check, keeps their findings, and prints one table.

Usage: `python -m bench.device [all|quick|throughput]`, by way of check.sh. Each part has a process and a
limit of its own; whatever one of them does, the others run. All that was found so far is in device.json in
the results folder at any time, and device.log has what all parts said. The exit status is 1 if something was
wrong or a part did not end as it should; speed is not judged.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.common import ROOT, print_table
from bench.device.part import NO_DEVICE_STATUS, Clock, read_json, write_json
from bench.device.report import HEADER, rows

RESULTS = "device.json"
LOG = "device.log"
_TOTAL_S = 470.0
_START_S = 12.0
"""What a process needs to begin, and to end what it is in the middle of."""

_CPU_PATIENCE = 4
_TICK_S = 2.0
_SHOWN_LINES = 12
_QUICK, _THROUGHPUT, _ALL = "quick", "throughput", "all"


@dataclass(frozen=True)
class Part:
    """How many seconds something may take, and which runs it belongs to.

    It is a module of this folder: that of its name, or another one with an option.
    """

    name: str
    limit_s: float
    runs: tuple[str, ...]
    module: str | None = None
    option: str | None = None


STAGES = (
    (Part("ceilings", 40, (_QUICK, _THROUGHPUT)),),
    # Whether results are right does not depend on who else uses the GPU: these run side by side.
    (Part("kernels", 105, (_QUICK,)), Part("device_tests", 105, (_QUICK,)), Part("equality", 105, (_QUICK,))),
    (Part("loading_tests", 50, (_QUICK,), "device_tests", "--alone"),),
    (Part("bandwidth", 50, (_QUICK,)),),
    (Part("throughput", 90, (_THROUGHPUT,)),),
    (Part("peer", 75, (_THROUGHPUT,)),),
    (Part("breakdown", 60, (_THROUGHPUT,)),),
)


@dataclass
class Running:
    """A part that runs, or has."""

    part: Part
    process: subprocess.Popen[bytes]
    json: Path
    log: Path
    clock: Clock
    started_s: float
    seconds: float = 0.0
    status: str = "running"

    @property
    def is_over(self) -> bool:
        """Whether the process has ended; ends it if its time is over."""
        status = self.process.poll()
        if status is None and self.clock.left_s <= 0:
            os.killpg(self.process.pid, signal.SIGKILL)  # what it has started, too
            self.process.wait()
            self.status = "cut at its limit"
        elif status is not None and self.status == "running":
            self.status = "done" if status == 0 else f"failed with {status}"
        self.seconds = time.monotonic() - self.started_s
        return self.status != "running"


class Check:
    """One run of all parts that were asked for."""

    def __init__(self, arguments: argparse.Namespace, work: Path) -> None:
        """Start nothing yet."""
        self._arguments = arguments
        self._work = work
        # Interpreting kernels takes as long as it takes: limits are for a machine that is waited for.
        self._patience = 1 if arguments.device != "cpu" else _CPU_PATIENCE
        self._clock = Clock(self._patience * arguments.limit_s)
        self._out = Path(os.environ.get("OUT") or ROOT / "bench" / "results" / "device")
        self._out.mkdir(parents=True, exist_ok=True)
        self._all: list[Running] = []
        self._started = datetime.now(UTC).isoformat(timespec="seconds")

    def run(self) -> int:
        """Run all stages, print the table, return the exit status."""
        for stage in STAGES:
            chosen = [part for part in stage if self._arguments.run in (*part.runs, _ALL)]
            if chosen and self._clock.left_s > _START_S and not self._run_stage(chosen):
                print(
                    "there is no CUDA device that torch sees; --device cpu --tiny tries the parts out without"
                )
                return 2
        self._write()
        self._write_log()
        print_table(HEADER, [list(row) for row in rows(self._found())])
        print_table(
            ["part", "status", "seconds"],
            [[each.part.name, each.status, f"{each.seconds:.0f}"] for each in self._all],
        )
        print(f"{self._out / RESULTS}, {self._out / LOG}")
        missing = self._count_parts() - len(self._all)
        if missing:
            print(f"{missing} parts were not begun: the time was over")
        return 1 if missing or any(each.status != "done" for each in self._all) else 0

    def _count_parts(self) -> int:
        return sum(self._arguments.run in (*part.runs, _ALL) for stage in STAGES for part in stage)

    def _run_stage(self, parts: list[Part]) -> bool:
        """Run some parts side by side; return whether there is a device."""
        running = [self._start(part) for part in parts]
        self._all += running
        while not all([each.is_over for each in running]):  # noqa: C419 - every one has to be looked at
            self._write()
            time.sleep(_TICK_S if self._arguments.device != "cpu" else _TICK_S / 10)
        self._write()
        for each in running:
            print(f"{each.part.name}: {each.status} after {each.seconds:.0f} s", flush=True)
            if each.status != "done":
                lines = each.log.read_text(encoding="utf-8", errors="replace").splitlines()
                print("\n".join(f"  {line[:200]}" for line in lines[-_SHOWN_LINES:]), flush=True)
        return all(each.process.returncode != NO_DEVICE_STATUS for each in running)

    def _start(self, part: Part) -> Running:
        found, log = self._work / f"{part.name}.json", self._work / f"{part.name}.log"
        limit_s = min(self._patience * part.limit_s, self._clock.left_s)
        command = command_of(part, self._arguments, found, max(1.0, limit_s - _START_S))
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, process_group=0
            )
        return Running(part, process, found, log, Clock(limit_s), time.monotonic())

    def _found(self) -> dict[str, dict[str, Any]]:
        return {each.part.name: read_json(each.json) for each in self._all}

    def _write(self) -> None:
        found = self._found()
        write_json(
            self._out / RESULTS,
            {
                "started": self._started,
                "run": self._arguments.run,
                "is_tiny": self._arguments.tiny,
                "machine": found.get("ceilings", {}).get("machine"),
                "parts": {
                    each.part.name: {
                        "status": each.status,
                        "seconds": round(each.seconds, 1),
                        "found": found[each.part.name],
                    }
                    for each in self._all
                },
            },
        )

    def _write_log(self) -> None:
        with (self._out / LOG).open("wb") as log:
            for each in self._all:
                log.write(f"==== {each.part.name}: {each.status} ====\n".encode())
                log.write(each.log.read_bytes())


def command_of(part: Part, arguments: argparse.Namespace, found: Path, limit_s: float) -> list[str]:
    """Return what starts a part."""
    module = f"bench.device.{part.module or part.name}"
    command = [sys.executable, "-m", module, "--device", arguments.device]
    command += ["--json", str(found), "--limit-s", str(limit_s)]
    command += [part.option] if part.option else []
    return [*command, "--tiny"] if arguments.tiny else command


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Return what was asked for."""
    parser = argparse.ArgumentParser(
        prog="check.sh", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", choices=[_ALL, _QUICK, _THROUGHPUT], nargs="?", default=_ALL)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="next to nothing, to see that it works")
    parser.add_argument("--limit-s", type=float, default=_TOTAL_S, help="for all parts together")
    return parser.parse_args(words)


def main() -> int:
    """Run the check."""
    arguments = parse()
    with tempfile.TemporaryDirectory() as work:
        return Check(arguments, Path(work)).run()


if __name__ == "__main__":
    sys.exit(main())
