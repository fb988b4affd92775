"""The other end of a driver: starts its process, gives it jobs, keeps it still while others are measured."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from bench.common import ROOT, Activity, Figures
from bench.peers.driver import Job
from bench.peers.table import Home, Peer
from bench.suspension import Suspension


class Worker:
    """One engine in a process of its own; a context manager, stopped except while it runs a job."""

    def __init__(
        self, python: Path, driver: str, settings: dict[str, Any], environment: dict[str, str]
    ) -> None:
        """Start the driver and wait until its engine is loaded."""
        self._process = subprocess.Popen(
            [python, "-m", f"bench.peers.{driver}", json.dumps(settings)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._stack = ExitStack()
        self._suspension = Suspension(self._process.pid)
        try:
            self.description: str = self._read()["description"]
        except BaseException:
            self._process.terminate()
            raise

    def __enter__(self) -> Self:
        """Keep it still from now on."""
        self._stack.enter_context(self._suspension)
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self._stack.close()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def run(self, job: Job) -> Figures:
        """Return the figures of a job, and how much of the machine others used meanwhile."""
        with self._suspension.lifted():
            activity = Activity()
            if self._process.stdin is not None:
                self._process.stdin.write(job.encode() + "\n")
                self._process.stdin.flush()
            return {**self._read(), **activity.others()}

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise SystemExit(f"the driver ended with status {self._process.wait()}; see above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def start_peer(peer: Peer, home: Home, case: str, settings: dict[str, Any]) -> Worker:
    """Start the driver of a peer; `settings` win over the table's."""
    driver = peer.server_driver if case == "W4" and peer.server_driver is not None else peer.driver
    python = Path(sys.executable) if peer.venv is None else home.python(peer.venv)
    chosen = {"home": str(home.folder), **peer.settings(home), **settings}
    added = peer.environment(home, chosen["threads"])
    return Worker(python, driver, chosen, {**os.environ, **added})


def start_own(driver: str, settings: dict[str, Any]) -> Worker:
    """Start a driver of ours."""
    return Worker(Path(sys.executable), driver, settings, dict(os.environ))
