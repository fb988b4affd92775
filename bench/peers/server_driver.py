"""Drives an engine through its server: this process is the client. Standard library only."""

import subprocess
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.common import Figures, peak_memory_mb
from bench.http_client import LoadJob, run_load
from bench.peers.driver import Job
from bench.server import free_port, server_environment, wait_until_ready
from bench.workload import Prompt, shared_prefix

STOP_TIMEOUT_S = 60


@dataclass(frozen=True)
class ServerCommand:
    """How to start a server and how to speak with it.

    `arguments` gives the command line for a port. `model` is what requests name. `restarts_for` names the
    cases whose every run gets a new server, because a prefix cache cannot be emptied otherwise; `reset_path`
    is where to POST to empty it. `body_fields` gives, for a case, what goes into each request's body.
    """

    arguments: Callable[[int], list[str]]
    description: str
    health_path: str = "/health"
    model: str = "m"
    environment: Mapping[str, str] = field(default_factory=dict)
    restarts_for: tuple[str, ...] = ()
    reset_path: str | None = None
    body_fields: Callable[[str], dict[str, Any]] = lambda _: {}


class ServerDriver:
    """A `Driver` of a server."""

    def __init__(self, command: ServerCommand) -> None:
        """Start the server."""
        self.description = command.description
        self._command = command
        self._start()

    def run(self, job: Job) -> Figures:
        """Send the requests of a job; the memory is that of the server and its children."""
        if job.case in self._command.restarts_for:
            self.close()
            self._start()
        elif self._command.reset_path is not None:
            self._post(self._command.reset_path)
        if job.case == "W3w":
            self._send(Job(job.case, [shared_prefix(job.prompts)]))
        figures = self._send(job)
        return {**figures, "peak_mb": peak_memory_mb(self._process.pid)}

    def close(self) -> None:
        """End the server."""
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            self._command.arguments(port),
            env={**server_environment(), **self._command.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        wait_until_ready(self._url + self._command.health_path, self._process)
        self._send(Job("W2", [Prompt(list(range(1000, 1064)), 8) for _ in range(4)]))

    def _send(self, job: Job) -> Figures:
        command = self._command
        return run_load(
            LoadJob(
                self._url, job.case, job.prompts, job.arrivals_s, command.model, command.body_fields(job.case)
            )
        )

    def _post(self, path: str) -> None:
        request = urllib.request.Request(self._url + path, method="POST")  # noqa: S310 - the peer's server
        with urllib.request.urlopen(request, timeout=60):  # noqa: S310
            pass
