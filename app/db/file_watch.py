"""Whether the history file is still the one that was opened, and still looks like one."""

import os
import threading
import time
from pathlib import Path

from app.db.faults import FileFaultError, damaged

_MAGIC = b"SQLite format 3\0"
_HEADER_BYTES = 100
_PAGE_SIZE = slice(16, 18)
_NUM_PAGES = slice(28, 32)
_LARGEST_PAGE = 65_536

_LOOKS = 3
_PAUSE_S = 0.02
"""A file that is being made smaller in good order may look cut off for a moment, never so often."""


class FileWatch:
    """Holds the file open to look at it.

    It must stay open for as long as SQLite uses the file in this process: closing any handle of a file lets
    go of all of the process's locks on it. Close it last.
    """

    def __init__(self, path: Path) -> None:
        """Open the file; raises `OSError`."""
        self._path = path
        self._lock = threading.Lock()
        self._is_closed = False
        self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Let go of the file, once no connection is left; waits for a look that goes on. Safe to repeat."""
        with self._lock:
            if not self._is_closed:
                os.close(self._handle)
            self._is_closed = True

    def check(self) -> None:
        """Raise a final `FileFaultError` if the file is gone, is another one, lost its header or was cut off.

        SQLite itself would go on writing to a deleted file, which nobody ever sees again, and reads a damaged
        page from its memory. Takes microseconds, on a disk that answers. May be called on any thread.
        """
        with self._lock:
            if not self._is_closed:
                self._check()

    def _check(self) -> None:
        if not self._is_in_place():
            raise FileFaultError(
                f"The history file {self._path} was deleted or replaced while the server ran. "
                "Restart the server for a new one.",
                is_final=True,
            )
        for look in range(_LOOKS):
            if look:
                time.sleep(_PAUSE_S)
            fault = self._find_fault()
            if not fault:
                return
        raise damaged(self._path, fault)

    def _is_in_place(self) -> bool:
        try:
            there = self._path.stat()
        except OSError:
            return False
        return os.path.samestat(there, os.fstat(self._handle))

    def _find_fault(self) -> str:
        header = os.pread(self._handle, _HEADER_BYTES, 0)
        if not header.startswith(_MAGIC) or len(header) < _HEADER_BYTES:
            return "it does not begin like a database"
        page_size = int.from_bytes(header[_PAGE_SIZE], "big")
        page_size = _LARGEST_PAGE if page_size == 1 else page_size
        num_bytes = int.from_bytes(header[_NUM_PAGES], "big") * page_size
        # In this order: pages leave the log only once they are in the file.
        log_bytes = self._measure_log()
        there_bytes = os.fstat(self._handle).st_size
        if there_bytes + log_bytes < num_bytes:
            return f"it has {there_bytes} of {num_bytes} bytes"
        return ""

    def _measure_log(self) -> int:
        """Return the size of SQLite's log, where pages may be that the file does not have yet."""
        try:
            return self._path.with_name(self._path.name + "-wal").stat().st_size
        except OSError:
            return 0
