"""What can be wrong with the history file, told apart from rows that it refuses."""

import errno
import shutil
import sqlite3
from pathlib import Path

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from app.errors import HistoryUnavailableError

_LOCKED = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_OTHER = {
    sqlite3.SQLITE_AUTH,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_INTERRUPT,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_READONLY,
}
_PRIMARY_CODE = 0xFF
"""SQLite's extended codes carry the primary one in their lowest byte."""

_FULL_BYTES = 64 * 1024
"""With less space than this an input or output error means a full disk: the log's index cannot grow."""


class FileFaultError(HistoryUnavailableError):
    """The file itself cannot be used. `is_final`: trying again in this run is of no use."""

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        """Keep beside the message whether it may pass."""
        super().__init__(message)
        self.is_final = is_final


def find_file_fault(path: Path, error: Exception) -> FileFaultError | None:
    """Return what an error says about the file at `path`, for people; None if it is about something else.

    Something else are rows that a constraint refuses, and faults of a statement.
    """
    if isinstance(error, FileFaultError):
        return error
    if isinstance(error, PoolTimeoutError):
        return FileFaultError(f"The history file {path} is busy.")
    if isinstance(error, OSError):
        return None if error.errno is None else _describe_os_error(path, error)
    code, text = _read_code(error)
    return None if code is None else _describe_code(path, code, text)


def is_about_tables(error: Exception) -> bool:
    """Whether SQLite finds fault with a statement: what it names is not there, which a lost file explains."""
    return _read_code(error)[0] == sqlite3.SQLITE_ERROR


def _read_code(error: Exception) -> tuple[int | None, str]:
    cause = error.orig if isinstance(error, DBAPIError) else error
    code = getattr(cause, "sqlite_errorcode", None)
    if not isinstance(cause, sqlite3.Error) or code is None:
        return None, ""
    return code & _PRIMARY_CODE, str(cause)


def _describe_os_error(path: Path, error: OSError) -> FileFaultError:
    if error.errno == errno.ENOSPC:
        return _full(path)
    return FileFaultError(f"The history file {path} cannot be opened: {error.strerror or error}.")


def _describe_code(path: Path, code: int, text: str) -> FileFaultError | None:
    if code in _LOCKED:
        return FileFaultError(f"Another process holds a lock on the history file {path}.")
    if code in _DAMAGED:
        return damaged(path, text)
    if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and _is_full(path)):
        return _full(path)
    if code in _OTHER:
        return FileFaultError(f"The history file {path} cannot be used: {text}.")
    return None


def damaged(path: Path, text: str) -> FileFaultError:
    """Return the fault of a file whose content is no longer what was written; `text` says what was seen."""
    return FileFaultError(
        f"The history file {path} is damaged ({text}). Move it away and restart the server.", is_final=True
    )


def _full(path: Path) -> FileFaultError:
    return FileFaultError(f"The disk that holds the history file {path} is full.")


def _is_full(path: Path) -> bool:
    try:
        return shutil.disk_usage(path.parent).free < _FULL_BYTES
    except OSError:
        return False
