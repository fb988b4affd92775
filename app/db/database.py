"""The history database file: two engines on it, one that writes and one that only reads."""

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine

from app.db.faults import FileFaultError, find_file_fault
from app.db.migrate import upgrade
from app.errors import HistoryUnavailableError

DATABASE_FILE = "history.db"

WRITE_BUSY_MS = 1000
"""How long a write waits for a lock before it is reported and tried again."""

READ_BUSY_MS = 5000
READ_POOL = 4

POOL_TIMEOUT_S = 20.0
"""How long to wait for a connection that others use."""

MAX_IDLE_LOG_BYTES = 64 * 2**20
"""What SQLite's write-ahead log is cut back to once its content is in the file."""

FileIdentity = tuple[int, int]
"""Device and inode: what stays the same as long as it is the same file."""


class Database:
    """One SQLite file in WAL mode; `open` brings it to the newest schema."""

    def __init__(self, path: Path) -> None:
        """Nothing is touched before `open`."""
        self.path = path
        self._writer: AsyncEngine | None = None
        self._reader: AsyncEngine | None = None
        self._identity: FileIdentity | None = None
        self.reason = "The history is being opened; try again in a moment."
        """Why it cannot be read, while it cannot."""

    @property
    def is_open(self) -> bool:
        """Whether it can be read and written."""
        return self._reader is not None

    async def open(self) -> None:
        """Create or upgrade the file and connect; raises `HistoryUnavailableError` saying why not."""
        try:
            await upgrade(self.path)
            identity = _identify(self.path)
        except HistoryUnavailableError as error:
            self.reason = str(error)
            raise
        except Exception as error:
            fault = find_file_fault(self.path, error) or FileFaultError(
                f"The history file {self.path} cannot be brought up to date: {error}", is_final=True
            )
            self.reason = str(fault)
            raise fault from error
        self._identity = identity
        self._writer = _make_engine(self.path, WRITE_BUSY_MS, is_writer=True)
        self._reader = _make_engine(self.path, READ_BUSY_MS, is_writer=False)

    async def close(self, reason: str = "The server is shutting down.") -> None:
        """Let go of the file; safe to repeat. `reason` is what readers are told from now on."""
        self.reason = reason
        engines, self._writer, self._reader = (self._reader, self._writer), None, None
        for engine in engines:
            if engine is not None:
                await engine.dispose()

    def check_file(self) -> None:
        """Raise `FileFaultError` if another file, or none, is where the opened one was.

        SQLite would go on writing to a deleted file, which nobody ever sees again.
        """
        try:
            is_same = _identify(self.path) == self._identity
        except OSError:
            is_same = False
        if self._identity is not None and not is_same:
            raise FileFaultError(
                f"The history file {self.path} was deleted or replaced while the server ran. "
                "Restart the server for a new one.",
                is_final=True,
            )

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncSession]:
        """Give a session that can only read; raises `HistoryUnavailableError` if the file cannot be read.

        Keep it for a moment only, never for the length of a stream.
        """
        if self._reader is None:
            raise HistoryUnavailableError(self.reason)
        try:
            async with AsyncSession(self._reader, expire_on_commit=False) as session:
                yield session
        except Exception as error:
            fault = find_file_fault(self.path, error)
            if fault is None:
                raise
            raise fault from error

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """Give the one connection that writes, in an immediate transaction, committed at the end.

        For `app.db.writer` and for maintenance in short transactions; nobody else. Raises `FileFaultError`
        if the file cannot be written, and whatever SQLAlchemy raises for rows that are refused.
        """
        engine = self._writer
        if engine is None:
            raise HistoryUnavailableError(self.reason)
        try:
            async with engine.begin() as connection:
                yield connection
        except Exception as error:
            fault = find_file_fault(self.path, error)
            if fault is None:
                raise
            await engine.dispose()  # a connection that met a full or broken disk may not recover with it
            raise fault from error


def _make_engine(path: Path, busy_ms: int, *, is_writer: bool) -> AsyncEngine:
    mode = "rw" if is_writer else "ro"
    url = f"sqlite+aiosqlite:///file:{quote(str(path))}?mode={mode}&uri=true"
    engine = create_async_engine(
        url,
        pool_size=1 if is_writer else READ_POOL,
        max_overflow=0,
        pool_timeout=POOL_TIMEOUT_S,
        hide_parameters=True,  # errors are logged; prompts are not
        connect_args={"isolation_level": None},  # BEGIN is ours, see below
    )

    @event.listens_for(engine.sync_engine, "connect")
    def _on_connect(connection: Any, _: object) -> None:
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {busy_ms}")
        if is_writer:
            cursor.execute("PRAGMA journal_mode = WAL")
            cursor.execute(f"PRAGMA journal_size_limit = {MAX_IDLE_LOG_BYTES}")
            cursor.execute("PRAGMA synchronous = NORMAL")
            cursor.execute("PRAGMA foreign_keys = ON")
        else:
            cursor.execute("PRAGMA query_only = ON")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def _on_begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if is_writer else "BEGIN")

    return engine


def _identify(path: Path) -> FileIdentity:
    status = path.stat()
    return status.st_dev, status.st_ino


def check_integrity(path: Path) -> str:
    """Return what `PRAGMA integrity_check` says, `ok` if all is well."""
    with closing(sqlite3.connect(path)) as connection:
        return str(connection.execute("PRAGMA integrity_check").fetchone()[0])
