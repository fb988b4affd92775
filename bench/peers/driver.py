"""What runs an engine for `bench.peers`: one process per engine, jobs in, figures out.

A driver is started as `python -m bench.peers.run_…` by the Python of the engine that it drives, with its
settings as JSON on the command line. It loads the engine, says so, and then runs one job for each line on
its standard input. Everything here imports nothing but the standard library.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from bench.common import Figures, end_on_signal, peak_memory_mb
from bench.workload import Prompt

Settings = dict[str, Any]
"""`home`: folder of the peers; `threads`: of a step; the rest is the driver's own."""


@dataclass(frozen=True)
class Job:
    """One run of a case; `arrivals_s` (seconds from the start) is None when all requests are due at once."""

    case: str
    prompts: list[Prompt]
    arrivals_s: list[float] | None = None

    def encode(self) -> str:
        """Return it as one line."""
        return json.dumps(asdict(self), separators=(",", ":"))


def decode_job(line: str) -> Job:
    """Return the job that a line describes."""
    fields = json.loads(line)
    prompts = [Prompt(**prompt) for prompt in fields["prompts"]]
    return Job(fields["case"], prompts, fields["arrivals_s"])


class Driver(Protocol):
    """An engine that is loaded. `description` is for people: versions and settings that matter."""

    description: str

    def run(self, job: Job) -> Figures:
        """Run a job, with no prefix cached but what the case wants, and return its figures."""
        ...

    def close(self) -> None:
        """End what was started."""
        ...


def serve(load: Callable[[Settings], Driver]) -> None:
    """Load the engine that the command line describes and run jobs until standard input ends."""
    end_on_signal()
    # What engines print must not get between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    driver = load(json.loads(sys.argv[1]))
    try:
        _answer(answers, {"description": driver.description})
        for line in sys.stdin:
            figures = driver.run(decode_job(line))
            figures.setdefault("peak_mb", peak_memory_mb())
            _answer(answers, figures)
    finally:
        driver.close()


def _answer(stream: Any, message: object) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()
