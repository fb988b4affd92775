"""One other rank as rank 0 sees it: a process, the way to it, and what is heard from it."""

import logging
import os
import signal
import subprocess
import sys
import time
from typing import IO, cast

import msgspec

from engine.parallel.messages import RankReport, Stage, write_frame
from engine.parallel.running import running

logger = logging.getLogger(__name__)

EXIT_TIMEOUT_S = 5.0
"""How long the system may take to end a process that was killed."""

_READ_BYTES = 65536
_MODULE = "engine.parallel.worker"


class RankProcess:
    """A running rank.

    Started and closed by the thread that computes; `read_reports` and all that it changes (`stage`, `share`,
    `message`, `heard_s`) belong to the monitor. `kill` may come from either.
    """

    def __init__(self, rank: int) -> None:
        """Start the process. Raises `OSError` if there can be no more of them."""
        self.rank = rank
        self.stage = Stage.STARTING
        self.share = 0.0
        self.message = ""
        self.heard_s = time.monotonic()
        """When there was last a sign of life; while it starts and loads, only news are one."""
        self.reports, writer = os.pipe()
        os.set_blocking(self.reports, False)
        self._rest = b""
        self._decoder = msgspec.json.Decoder(RankReport)
        try:
            # A session of its own: Ctrl-C in the terminal is for rank 0, which ends the others when it has
            # ended its requests. Modules come from where rank 0 has them, and from nowhere else (-P).
            self._process = subprocess.Popen(  # noqa: S603 - this package's own module
                [sys.executable, "-P", "-m", _MODULE, str(writer)],
                stdin=subprocess.PIPE,
                bufsize=0,
                pass_fds=(writer,),
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.curdir for entry in sys.path)},
            )
        except BaseException:
            os.close(self.reports)
            raise
        finally:
            os.close(writer)
        running.add(self._process)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def _input(self) -> IO[bytes]:
        return cast("IO[bytes]", self._process.stdin)

    def send(self, payload: bytes | memoryview) -> None:
        """Write a frame; raises `BrokenPipeError` if the process is gone."""
        write_frame(self._input.fileno(), payload)

    def read_reports(self) -> bool:
        """Take in what has come from the process; whether it is still there."""
        try:
            data = os.read(self.reports, _READ_BYTES)
        except BlockingIOError:
            return True
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(self._decoder.decode(line))
        return bool(data)

    def _take(self, report: RankReport) -> None:
        if report.stage is not None:
            self.stage, self.share = report.stage, report.share
            self.message = report.message or self.message
        if report.stage is not None or self.stage in (Stage.LOADED, Stage.READY):
            self.heard_s = time.monotonic()

    def kill(self) -> None:
        """End the process on the spot, also one that is stopped."""
        self._process.kill()

    def describe_end(self) -> str:
        """Say how the process ended; waits for that."""
        try:
            code = self._process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "it has closed its pipe"
        if code < 0:
            hint = " (the system does that when memory runs out)" if -code == signal.SIGKILL else ""
            return f"it was ended by {signal.Signals(-code).name}{hint}"
        return f"it ended with code {code}"

    def close(self) -> None:
        """End the process and forget it; when this returns, it has ended, unless the system holds it."""
        self._input.close()
        self.kill()
        try:
            self._process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.warning("Rank %d (process %d) was killed, but does not end", self.rank, self.pid)
        os.close(self.reports)
        running.discard(self._process)
