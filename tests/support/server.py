"""A real `pageglass serve` process for tests."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from tests.support.nursery import ForkedProcess

START_TIMEOUT_S = 30.0
READY_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.05

REPOSITORY = Path(__file__).resolve().parents[2]

_URL_LINE = re.compile(r"listening on (http://\S+)")
_KEPT_VARIABLES = ("PAGEGLASS_MODELS", "PAGEGLASS_NO_BROWSER")


class ServerProcess:
    """Context manager around one server process.

    `ServerProcess("--num-blocks", "64")` runs `python -m app serve --port 0 --data-dir TEMP
    --num-blocks 64` in the repository and, on entering, waits until the model is loaded
    (`wait_ready=False`: until the port answers). Leaving ends the process with SIGTERM, then SIGKILL.
    `is_forked=True` spares the imports and is otherwise the same (tests/support/nursery.py): for tests that
    are not about how a server starts.

    Attributes: `url` (no trailing slash), `process`, `data_dir`; `output` is all it has printed.
    """

    def __init__(
        self,
        *arguments: str,
        port: int = 0,
        data_dir: Path | None = None,
        env: Mapping[str, str] | None = None,
        wait_ready: bool = True,
        is_forked: bool = False,
    ) -> None:
        """Prepare; nothing starts before `start` or entering the context."""
        self._arguments = arguments
        self._port = port
        self._env = dict(env or {})
        self._wait_ready = wait_ready
        self._is_forked = is_forked
        self._scratch = tempfile.TemporaryDirectory(prefix="pageglass-test-")
        self._output_path = Path(self._scratch.name) / "output.txt"
        self.data_dir = data_dir or Path(self._scratch.name) / "data"
        self.url = ""
        self.process: subprocess.Popen[bytes] | ForkedProcess

    def __enter__(self) -> Self:
        """Start and wait as asked; never leaves a process behind when that fails."""
        try:
            self.start()
            if self._wait_ready:
                self.wait_until_ready()
        except BaseException:
            self._clean_up()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the process and remove its files."""
        self._clean_up()

    @property
    def output(self) -> str:
        """Everything the process has printed so far, stdout and stderr together."""
        if not self._output_path.exists():
            return ""
        return self._output_path.read_text(encoding="utf-8", errors="replace")

    def start(self) -> None:
        """Start the process and wait until it listens."""
        arguments = [
            *("serve", "--port", str(self._port), "--data-dir", str(self.data_dir)),
            *self._arguments,
        ]
        env = {**_clean_environment(), "PYTHONUNBUFFERED": "1", **self._env}
        if self._is_forked:
            self.process = ForkedProcess(arguments, env, self._output_path, self._output_path)
        else:
            self.process = _start_python(["-m", "app", *arguments], env, self._output_path)
        deadline = time.monotonic() + START_TIMEOUT_S
        while (found := _URL_LINE.search(self.output)) is None:
            self._check_alive()
            self._check_deadline(deadline, "listen")
            time.sleep(POLL_S)
        self.url = found.group(1).rstrip("/")

    def wait_until_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until `/health/ready` answers 200."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._check_alive()
            try:
                if httpx.get(f"{self.url}/health/ready", timeout=5).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            self._check_deadline(deadline, "become ready")
            time.sleep(POLL_S)

    def wait_for_exit(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Return the exit code of a process that ends by itself."""
        return self.process.wait(timeout=timeout_s)

    def stop(self, sig: signal.Signals = signal.SIGTERM, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Send a signal and return the exit code; raises `TimeoutExpired` if it does not end."""
        if self.process.poll() is None:
            self.process.send_signal(sig)
        return self.process.wait(timeout=timeout_s)

    def _check_alive(self) -> None:
        code = self.process.poll()
        if code is not None:
            raise AssertionError(f"the server exited with code {code}:\n{self.output}")

    def _check_deadline(self, deadline: float, what: str) -> None:
        if time.monotonic() > deadline:
            raise AssertionError(f"the server did not {what} in time:\n{self.output}")

    def _clean_up(self) -> None:
        process = getattr(self, "process", None)
        if process is not None and process.poll() is None:
            try:
                self.stop()
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._scratch.cleanup()


def run_to_exit(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run `pageglass` with arguments that should make it end by itself; stdout and stderr apart."""
    return subprocess.run(
        [sys.executable, "-m", "app", *arguments],
        cwd=REPOSITORY,
        env={**_clean_environment(), **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        check=False,
    )


def run_forked(
    *arguments: str, env: Mapping[str, str] | None = None, timeout_s: float = START_TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """Do as `run_to_exit` does, without the imports (tests/support/nursery.py)."""
    with tempfile.TemporaryDirectory(prefix="pageglass-test-") as folder:
        output, errors = Path(folder) / "output.txt", Path(folder) / "errors.txt"
        process = ForkedProcess(list(arguments), {**_clean_environment(), **(env or {})}, output, errors)
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
        return subprocess.CompletedProcess(arguments, code, output.read_text(), errors.read_text())


def _start_python(arguments: list[str], env: Mapping[str, str], output: Path) -> subprocess.Popen[bytes]:
    with output.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=REPOSITORY,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def _clean_environment() -> dict[str, str]:
    """Return this process's environment without settings of Pageglass, except where the models lie."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PAGEGLASS_") or name in _KEPT_VARIABLES
    }
