"""A real server process to measure."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

STOP_TIMEOUT_S = 30
READY_TIMEOUT_S = 600
"""Some servers take minutes on a busy machine."""

_POLL_S = 0.05


def start_server(
    data_dir: str, args: Sequence[str], module: str = "app"
) -> tuple[subprocess.Popen[bytes], str]:
    """Start `pageglass serve` on a free port; return the process and its URL, not waiting for it.

    `module` is what is run in place of `app`, with the same command line.
    """
    port = free_port()
    command = [sys.executable, "-m", module, "serve", "--port", str(port), "--data-dir", data_dir, *args]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=server_environment())
    return process, f"http://127.0.0.1:{port}"


def server_environment() -> dict[str, str]:
    """Return this process's environment without the variables of the benchmarks, which a server refuses."""
    return {name: text for name, text in os.environ.items() if not name.startswith("PAGEGLASS_BENCH_")}


def stop_server(process: subprocess.Popen[bytes]) -> None:
    """End the process as an operator would."""
    process.send_signal(signal.SIGTERM)
    process.wait(STOP_TIMEOUT_S)


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True)
class RunningServer:
    """A server that is ready; `ready_s` seconds after its start."""

    pid: int
    url: str
    model: str
    ready_s: float


@contextmanager
def running_server(args: Sequence[str], module: str = "app") -> Iterator[RunningServer]:
    """Serve with a data folder of its own until the end of the block."""
    with tempfile.TemporaryDirectory() as data_dir:
        started_s = time.perf_counter()
        process, url = start_server(data_dir, ["--served-model-name", "bench", *args], module)
        try:
            wait_until_ready(url + "/health/ready", process)
            yield RunningServer(process.pid, url, "bench", time.perf_counter() - started_s)
        finally:
            stop_server(process)


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Ask until the answer is a success. Raises `SystemExit` if the process ends or takes too long."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not _is_ready(url):
        if process.poll() is not None:
            raise SystemExit(f"the server ended with status {process.returncode} before it was ready")
        if time.monotonic() > deadline:
            raise SystemExit(f"the server was not ready after {READY_TIMEOUT_S} s")
        time.sleep(_POLL_S)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):  # noqa: S310 - our own server
            return True
    except (urllib.error.URLError, OSError):
        return False
