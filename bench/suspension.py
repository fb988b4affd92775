"""Keeps a process and its children from running while another one is measured."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Self

from bench.common import process_tree


class Suspension:
    """Stops a process tree from when the block is entered to its end, except while it is `lifted`.

    An engine that waits is not always idle: some spin, some look for work every few milliseconds.
    """

    def __init__(self, pid: int) -> None:
        """Name the root of the tree; nothing is stopped yet."""
        self._pid = pid

    def __enter__(self) -> Self:
        """Stop the tree."""
        self._signal(signal.SIGSTOP)
        return self

    def __exit__(self, *_: object) -> None:
        """Let the tree go on."""
        self._signal(signal.SIGCONT)

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Let the tree run during the block."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for pid in process_tree(self._pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
