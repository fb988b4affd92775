"""The history database file, and two engines on it: one writes, in a thread of its own, one only reads.

A transaction that writes is one trip to that thread and back, whatever is in it. Driven from the event loop,
each of its statements would be some trips, and the loop would spend six times as long on them.
"""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, Final, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
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

_OPTIONS: Final[dict[str, Any]] = {
    "hide_parameters": True,  # errors are logged; prompts are not
    "connect_args": {"isolation_level": None},  # BEGIN is ours, see `_prepare`
}
_T = TypeVar("_T")


class Database:
    """One SQLite file in WAL mode; `open` brings it to the newest schema."""

    def __init__(self, path: Path) -> None:
        """Nothing is touched before `open`."""
        self.path = path
        self._writer: _Writer | None = None
        self._reader: AsyncEngine | None = None
        self._watch: FileWatch | None = None
        self._final_fault: FileFaultError | None = None
        self.reason = "The history is being opened; try again in a moment."
        """Why it cannot be read, while it cannot."""

        self.before_read: Callable[[], Awaitable[None]] | None = None
        """Awaited before each reading."""

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
        self._writer = _Writer(self.path)
        self._reader = _make_reader(self.path)

    async def close(self, reason: str = "The server is shutting down.") -> None:
        """Let go of the file; safe to repeat. `reason` is what readers are told from now on."""
        self.reason = reason
        reader, self._reader = self._reader, None
        writer, self._writer = self._writer, None
        try:
            if reader is not None:
                await reader.dispose()
        finally:
            if writer is not None:
                await asyncio.to_thread(writer.close)
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
        if self.before_read is not None:
            await self.before_read()
        engine = self._reader
        if engine is None:
            raise HistoryUnavailableError(self.reason)
        async with self._use(engine), AsyncSession(engine, expire_on_commit=False) as session:
            yield session

    async def write(self, work: Callable[[Connection], _T]) -> _T:
        """Return what `work` returns for the one connection that writes, once it is committed.

        `work` runs in the thread that writes, in an immediate transaction, which is undone if it raises, and
        made to its end if the caller is cancelled meanwhile. For `app.db.writer` and for maintenance in short
        transactions; nobody else. Raises `FileFaultError` if the file cannot be written, and whatever
        SQLAlchemy raises for rows that are refused.
        """
        writer = self._writer
        if writer is None:
            raise HistoryUnavailableError(self.reason)

        def transact() -> _T:
            try:
                self.check_file()
                with writer.engine.begin() as connection:
                    return work(connection)
            except Exception as error:
                fault = self._find_fault(error)
                if fault is None:
                    raise
                writer.engine.dispose()  # a connection that met a full or broken disk may not recover with it
                raise fault from error

        return await asyncio.get_running_loop().run_in_executor(writer.thread, transact)

    @asynccontextmanager
    async def _use(self, engine: AsyncEngine) -> AsyncIterator[None]:
        """Tell what goes wrong with the file in people's words, and leave no connection behind."""
        pool = engine.sync_engine.pool
        try:
            yield
        except Exception as error:
            fault = await asyncio.to_thread(self._find_fault, error)
            if fault is not None:
                raise fault from error
            if engine is not self._reader and isinstance(error, DBAPIError):
                raise HistoryUnavailableError(self.reason) from error
            raise
        finally:
            if engine.sync_engine.pool is not pool:  # closed in the meantime
                await greenlet_spawn(pool.dispose)

    def _find_fault(self, error: Exception) -> FileFaultError | None:
        """Return what an error says about the file; what ends its use is kept for the writer to find.

        In any thread but the event loop's.
        """
        fault = find_file_fault(self.path, error)
        if fault is None and is_about_tables(error):  # the tables were there when it was opened
            try:
                self.check_file()
            except FileFaultError as found:
                fault = found
        if fault is not None and fault.is_final and self._final_fault is None:
            self._final_fault = fault
        return fault


class _Writer:
    """The engine with the one connection that writes, and the thread in which alone it is used."""

    def __init__(self, path: Path) -> None:
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="history")
        self.engine = create_engine(file_url(path, "rw"), pool_size=1, max_overflow=0, **_OPTIONS)
        _prepare(self.engine, WRITE_BUSY_MS, is_writer=True)

    def close(self) -> None:
        """Wait for what is being written, and let go of the file."""
        self.thread.submit(self.engine.dispose)
        self.thread.shutdown()


def _make_reader(path: Path) -> AsyncEngine:
    engine = create_async_engine(
        file_url(path, "ro", ASYNC_DRIVER),
        pool_size=READ_POOL,
        max_overflow=0,
        pool_timeout=POOL_TIMEOUT_S,
        **_OPTIONS,
    )
    _prepare(engine.sync_engine, READ_BUSY_MS, is_writer=False)
    return engine


def _prepare(engine: Engine, busy_ms: int, *, is_writer: bool) -> None:
    """Have connections set up when they are made, and transactions begun as they should be."""

    @event.listens_for(engine, "connect")
    def _on_connect(connection: Any, _: object) -> None:
        try:
            _set_up(connection, busy_ms, is_writer=is_writer)
        except Exception:
            connection.close()  # the pool forgets it
            raise

    @event.listens_for(engine, "begin")
    def _on_begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if is_writer else "BEGIN")


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
