"""The history's database in tests: rows to write, what is in the file, and others that hold it."""

import contextlib
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import BigInteger, Boolean, Connection, Executable, LargeBinary, insert

from app.db.database import DATABASE_FILE, Database
from app.db.models import SessionRow
from app.db.urls import file_uri
from app.db.writer import HistoryWriter
from app.db.writes import Write

INSERT_SESSION = insert(SessionRow)

_HOLDER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("held", flush=True)
sys.stdin.readline()
connection.execute("ROLLBACK")
"""


def session_values(name: str, started_ns: int = 1, **values: Any) -> dict[str, Any]:
    """Return a row of `sessions`."""
    row = {"id": name, "started_ns": started_ns, "model_name": "m", "version": "0", "records_text": True}
    defaults = {"first_step": 1, "last_step": 0, "note": "", "is_starred": False}
    return {**row, **defaults, **values}


def session_write(
    name: str, *, num_steps: int = 0, on_lost: Callable[[], None] | None = None, **values: Any
) -> Write:
    """Return what inserts one session."""
    return Write(INSERT_SESSION, [session_values(name, **values)], num_steps=num_steps, on_lost=on_lost)


def value_for(column: Any) -> Any:
    """Return a value that fits a column; keys of all tables refer to each other."""
    if column.foreign_keys or column.name == "id":
        return "same"
    if isinstance(column.type, Boolean):
        return True
    if isinstance(column.type, BigInteger):
        return 1
    return b"blob" if isinstance(column.type, LargeBinary) else "text"


async def execute(database: Database, *statements: Executable) -> None:
    """Change the file in one transaction, past the writer's queue."""

    def work(connection: Connection) -> None:
        for statement in statements:
            connection.execute(statement)

    await database.write(work)


def fetch(path: Path, sql: str, *parameters: Any) -> list[tuple[Any, ...]]:
    """Return the rows of a query on the file, read by a connection of its own."""
    with contextlib.closing(sqlite3.connect(f"{file_uri(path)}?mode=ro", uri=True)) as connection:
        return connection.execute(sql, parameters).fetchall()


@contextlib.contextmanager
def lock_held(path: Path) -> Iterator[None]:
    """Let another process hold a write transaction on the file."""
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield
        finally:
            process.communicate("\n", timeout=10)


@contextlib.asynccontextmanager
async def written_history(folder: Path) -> AsyncIterator[tuple[Database, HistoryWriter]]:
    """Give an open database in `folder` with its writer, which leaving stops."""
    database = Database(folder / DATABASE_FILE)
    writer = HistoryWriter(database, flush_s=0.001)
    writer.start()
    try:
        yield database, writer
    finally:
        await writer.stop(5.0)


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a small file system on `folder`; raises `CalledProcessError` where that is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, capture_output=True)


def fill(path: Path) -> None:
    """Write a file until the disk is full."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
