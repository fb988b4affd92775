"""Server processes without their imports: one process makes those, seconds of them, and is forked per server.

A fork has made its imports and nothing else: it reads arguments, environment, files and model for itself, and
ends like any process. Not for tests of how the program starts.
"""

import atexit
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

_REPOSITORY = Path(__file__).resolve().parents[2]
MODULES = (
    *("app.cli", "app.asgi", "app.plugins"),
    *("engine.loading", "engine.native_backend", "transformers.tokenization_utils_fast"),
)
"""What takes long to import; a server imports by itself whatever is missing here."""

POLL_S = 0.01


class Nursery:
    """The tests' end: asks the process that forks, which knows how its children ended."""

    def __init__(self) -> None:
        """Start the process; it lives until `close`."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.nursery", str(theirs.fileno())],
                cwd=_REPOSITORY,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        with ours:
            self._stream = ours.makefile("rw", encoding="utf-8")
        self._lock = threading.Lock()

    def ask(self, **request: Any) -> Any:
        """Send a request and return its answer; fails if the process is gone."""
        with self._lock:
            self._stream.write(json.dumps(request) + "\n")
            self._stream.flush()
            return json.loads(self._stream.readline())

    def close(self) -> None:
        """End the process."""
        self._stream.close()
        self._process.wait()


@cache
def open_nursery() -> Nursery:
    """Return the one nursery of this process; it is closed at the end."""
    nursery = Nursery()
    atexit.register(nursery.close)
    return nursery


class ForkedProcess:
    """As much of `subprocess.Popen` as a test needs of a server."""

    def __init__(self, arguments: list[str], env: Mapping[str, str], output: Path, errors: Path) -> None:
        """Run `pageglass` with arguments; stdout and stderr are appended to files, which may be the same."""
        self._nursery = open_nursery()
        files = [str(output), str(errors)]
        self.pid: int = self._nursery.ask(arguments=arguments, env=dict(env), files=files)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, minus the signal that ended it, or None while it runs."""
        if self.returncode is None:
            self.returncode = self._nursery.ask(poll=self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; raises `TimeoutExpired`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            time.sleep(POLL_S)
        return code

    def send_signal(self, sig: int) -> None:
        """Send a signal; the id is not taken by another process before `poll` has told the end."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


def _serve(control: socket.socket) -> list[str] | None:
    """Fork on request until the other end is closed; return a child's arguments, in the child only."""
    with control, control.makefile("rw", encoding="utf-8") as stream:
        children: set[int] = set()
        for line in stream:
            request = json.loads(line)
            if "poll" in request:
                pid, status = os.waitpid(request["poll"], os.WNOHANG)
                answer = os.waitstatus_to_exitcode(status) if pid else None
                children.discard(pid)
            else:
                answer = os.fork()
                if answer == 0:
                    _become_server(request["env"], request["files"])
                    return ["pageglass", *request["arguments"]]
                children.add(answer)
            stream.write(json.dumps(answer) + "\n")
            stream.flush()
    for pid in children:  # the tests ended before they could
        os.kill(pid, signal.SIGTERM)
    return None


def _become_server(env: dict[str, str], files: list[str]) -> None:
    """Take the environment, the files and the way with signals that a new process would have."""
    os.environ.clear()
    os.environ.update(env)
    for target, file in enumerate(files, start=1):
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(descriptor, target)
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def main() -> None:
    """Import, fork, and in each child run the program."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, which then close this one
    for module in MODULES:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # pages that the children share
    arguments = _serve(socket.socket(fileno=int(sys.argv[1])))
    if arguments is not None:
        sys.argv = arguments
        importlib.import_module("app.__main__").run()


if __name__ == "__main__":
    main()
