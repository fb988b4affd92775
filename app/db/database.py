"""The history database file: two engines on it, one that writes and one that only reads."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

from sqlalchemy import event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.util import greenlet_spawn

from app.db.faults import FileFaultError, find_file_fault, is_about_tables
from app.db.file_watch import FileWatch
from app.db.migrate import upgrade
from app.db.urls import ASYNC_DRIVER, file_url
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


class Database:
    """One SQLite file in WAL mode; `open` brings it to the newest schema."""

    def __init__(self, path: Path) -> None:
        """Nothing is touched before `open`."""
        self.path = path
        self._writer: AsyncEngine | None = None
        self._reader: AsyncEngine | None = None
        self._watch: FileWatch | None = None
        self._final_fault: FileFaultError | None = None
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
            watch = FileWatch(self.path)
        except HistoryUnavailableError as error:
            self.reason = str(error)
            raise
        except Exception as error:
            fault = find_file_fault(self.path, error) or FileFaultError(
                f"The history file {self.path} cannot be brought up to date: {error}", is_final=True
            )
            self.reason = str(fault)
            raise fault from error
        self._watch, self._final_fault = watch, None
        self._writer = _make_engine(self.path, WRITE_BUSY_MS, is_writer=True)
        self._reader = _make_engine(self.path, READ_BUSY_MS, is_writer=False)

    async def close(self, reason: str = "The server is shutting down.") -> None:
        """Let go of the file; safe to repeat. `reason` is what readers are told from now on."""
        self.reason = reason
        engines, self._writer, self._reader = (self._reader, self._writer), None, None
        for engine in engines:
            if engine is not None:
                await engine.dispose()
        watch, self._watch = self._watch, None  # before waiting: two may close at once
        if watch is not None:
            await asyncio.to_thread(watch.close)

    def check_file(self) -> None:
        """Raise `FileFaultError` if the file is no longer what was opened, as far as is known.

        What readers met counts too: the writer's own pages may all be in its memory. Blocks for microseconds.
        """
        if self._final_fault is not None:
            raise self._final_fault
        if self._watch is not None:
            self._watch.check()

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncSession]:
        """Give a session that can only read; raises `HistoryUnavailableError` if the file cannot be read.

        Keep it for a moment only, never for the length of a stream.
        """
        engine = self._reader
        if engine is None:
            raise HistoryUnavailableError(self.reason)
        async with self._use(engine), AsyncSession(engine, expire_on_commit=False) as session:
            yield session

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
            async with self._use(engine), engine.begin() as connection:
                yield connection
        except FileFaultError:
            await engine.dispose()  # a connection that met a full or broken disk may not recover with it
            raise

    @asynccontextmanager
    async def _use(self, engine: AsyncEngine) -> AsyncIterator[None]:
        """Tell what goes wrong with the file in people's words, and leave no connection behind."""
        pool = engine.sync_engine.pool
        try:
            yield
        except Exception as error:
            fault = await self._find_fault(error)
            if fault is not None:
                raise fault from error
            if engine not in {self._reader, self._writer} and isinstance(error, DBAPIError):
                raise HistoryUnavailableError(self.reason) from error
            raise
        finally:
            if engine.sync_engine.pool is not pool:  # closed in the meantime
                await greenlet_spawn(pool.dispose)

    async def _find_fault(self, error: Exception) -> FileFaultError | None:
        """Return what an error says about the file; what ends its use is kept for the writer to find."""
        fault = find_file_fault(self.path, error)
        if fault is None and is_about_tables(error):  # the tables were there when it was opened
            try:
                await asyncio.to_thread(self.check_file)
            except FileFaultError as found:
                fault = found
        if fault is not None and fault.is_final and self._final_fault is None:
            self._final_fault = fault
        return fault


def _make_engine(path: Path, busy_ms: int, *, is_writer: bool) -> AsyncEngine:
    engine = create_async_engine(
        file_url(path, "rw" if is_writer else "ro", ASYNC_DRIVER),
        pool_size=1 if is_writer else READ_POOL,
        max_overflow=0,
        pool_timeout=POOL_TIMEOUT_S,
        hide_parameters=True,  # errors are logged; prompts are not
        connect_args={"isolation_level": None},  # BEGIN is ours, see below
    )

    @event.listens_for(engine.sync_engine, "connect")
    def _on_connect(connection: Any, _: object) -> None:
        try:
            _set_up(connection, busy_ms, is_writer=is_writer)
        except Exception:
            connection.close()  # the pool forgets it
            raise

    @event.listens_for(engine.sync_engine, "begin")
    def _on_begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if is_writer else "BEGIN")

    return engine


def _set_up(connection: Any, busy_ms: int, *, is_writer: bool) -> None:
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {busy_ms}")
    if is_writer:
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute(f"PRAGMA journal_size_limit = {MAX_IDLE_LOG_BYTES}")
        cursor.execute("PRAGMA synchronous = NORMAL")
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.execute("PRAGMA secure_delete = ON")  # deleted texts are not left in free pages
    else:
        cursor.execute("PRAGMA query_only = ON")
    cursor.close()


def check_integrity(path: Path) -> str:
    """Return what `PRAGMA integrity_check` says, `ok` if all is well."""
    with closing(sqlite3.connect(path)) as connection:
        return str(connection.execute("PRAGMA integrity_check").fetchone()[0])
