"""The history database file: two engines on it, one that writes and one that only reads."""

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import event
from sqlalchemy.exc import DatabaseError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine

from app.db.migrate import upgrade
from app.errors import HistoryUnavailableError

DATABASE_FILE = "history.db"

WRITE_BUSY_MS = 1000
"""How long a write waits for a lock before it is reported and tried again."""

READ_BUSY_MS = 5000
READ_POOL = 4


class Database:
    """One SQLite file in WAL mode; `open` brings it to the newest schema."""

    def __init__(self, path: Path) -> None:
        """Nothing is touched before `open`."""
        self.path = path
        self._writer: AsyncEngine | None = None
        self._reader: AsyncEngine | None = None
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
            writer = _make_engine(self.path, WRITE_BUSY_MS, is_writer=True)
            reader = _make_engine(self.path, READ_BUSY_MS, is_writer=False)
        except (DatabaseError, OSError, HistoryUnavailableError) as error:
            self.reason = describe_database_error(self.path, error)
            raise HistoryUnavailableError(self.reason) from error
        self._writer, self._reader = writer, reader

    async def close(self) -> None:
        """Let go of the file; safe to repeat."""
        engines, self._writer, self._reader = (self._reader, self._writer), None, None
        for engine in engines:
            if engine is not None:
                await engine.dispose()

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
        except DatabaseError as error:
            raise HistoryUnavailableError(describe_database_error(self.path, error)) from error

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """Give a connection in one immediate transaction, committed at the end; for the writer alone."""
        if self._writer is None:
            raise HistoryUnavailableError(self.reason)
        async with self._writer.begin() as connection:
            yield connection


def describe_database_error(path: Path, error: Exception) -> str:
    """Return what is wrong with the file and what to do, for people."""
    text = str(getattr(error, "orig", None) or error)
    if isinstance(error, HistoryUnavailableError):
        return text
    if "malformed" in text or "not a database" in text:
        return f"The history file {path} is damaged ({text}). Move it away and restart; the server goes on."
    if "locked" in text:
        return f"Another process holds a lock on the history file {path}."
    if "full" in text or "No space" in text:
        return f"The disk that holds the history file {path} is full."
    return f"The history file {path} cannot be used: {text}."


def _make_engine(path: Path, busy_ms: int, *, is_writer: bool) -> AsyncEngine:
    mode = "rw" if is_writer else "ro"
    url = f"sqlite+aiosqlite:///file:{quote(str(path))}?mode={mode}&uri=true"
    engine = create_async_engine(
        url,
        pool_size=1 if is_writer else READ_POOL,
        max_overflow=0,
        connect_args={"isolation_level": None},  # BEGIN is ours, see below
    )

    @event.listens_for(engine.sync_engine, "connect")
    def _on_connect(connection: Any, _: object) -> None:
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {busy_ms}")
        if is_writer:
            cursor.execute("PRAGMA journal_mode = WAL")
            cursor.execute("PRAGMA synchronous = NORMAL")
            cursor.execute("PRAGMA foreign_keys = ON")
        else:
            cursor.execute("PRAGMA query_only = ON")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def _on_begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if is_writer else "BEGIN")

    return engine


def check_integrity(path: Path) -> str:
    """Return what `PRAGMA integrity_check` says, `ok` if all is well."""
    with sqlite3.connect(path) as connection:
        return str(connection.execute("PRAGMA integrity_check").fetchone()[0])
