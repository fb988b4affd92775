"""The opened file: whatever its folder is called, and what is seen of it while it is in use."""

import asyncio
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Connection, delete, func, insert, select

from app.db.database import DATABASE_FILE, Database
from app.db.faults import FileFaultError
from app.db.file_watch import FileWatch
from app.db.migrate import newest_revision, read_revision
from app.db.models import SessionRow
from app.errors import HistoryUnavailableError
from tests.support.history import execute, fetch, session_values


def names_in(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


NAMES = ("100%", "a%20b", "what?", "x?mode=ro", "#1", "two words", "Bücher", "a&b=c")


async def test_what_is_deleted_is_overwritten_in_the_file(tmp_path: Path) -> None:
    database = Database(tmp_path / DATABASE_FILE)
    await database.open()
    await execute(database, insert(SessionRow).values({**session_values("s"), "note": "a secret note"}))
    await execute(database, delete(SessionRow))
    await database.close()
    assert b"a secret note" not in (tmp_path / DATABASE_FILE).read_bytes()


async def test_what_is_being_written_is_written_to_its_end_whoever_leaves(tmp_path: Path) -> None:
    database = Database(tmp_path / DATABASE_FILE)
    await database.open()
    begun, may_end = threading.Event(), threading.Event()

    def write_slowly(connection: Connection) -> None:
        connection.execute(insert(SessionRow).values(session_values("s")))
        begun.set()
        assert may_end.wait(20)

    writing = asyncio.create_task(database.write(write_slowly))
    await asyncio.to_thread(begun.wait, 20)
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    closing_it = asyncio.create_task(database.close())
    await asyncio.sleep(0)
    assert not closing_it.done()
    may_end.set()
    await closing_it

    assert writing.cancelled()
    assert fetch(database.path, "SELECT id FROM sessions") == [("s",)]
    with pytest.raises(HistoryUnavailableError, match="shutting down"):
        await database.write(lambda _: None)


async def test_what_raises_while_it_writes_leaves_nothing(tmp_path: Path) -> None:
    database = Database(tmp_path / DATABASE_FILE)
    await database.open()

    def fail(connection: Connection) -> None:
        connection.execute(insert(SessionRow).values(session_values("half")))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await database.write(fail)
    await execute(database, insert(SessionRow).values(session_values("whole")))
    await database.close()

    assert fetch(database.path, "SELECT id FROM sessions") == [("whole",)]


async def test_two_who_close_at_once_close_once(tmp_path: Path) -> None:
    database = Database(tmp_path / DATABASE_FILE)
    await database.open()
    await asyncio.gather(database.close(), database.close())


@pytest.mark.parametrize("name", NAMES)
async def test_a_folder_may_have_any_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name / DATABASE_FILE
    database = Database(path)
    await database.open()
    await execute(database, insert(SessionRow).values(session_values("s")))
    async with database.read() as session:
        assert await session.scalar(select(func.count()).select_from(SessionRow)) == 1
    await database.close()

    assert names_in(tmp_path) == [name]
    assert names_in(path.parent) == [DATABASE_FILE, f"{DATABASE_FILE}.upgrade-lock"]
    assert read_revision(path) == newest_revision()


async def test_a_folder_whose_name_is_no_text_is_used_too(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    database = Database(folder / DATABASE_FILE)
    await database.open()
    await database.close()

    assert (folder / DATABASE_FILE).exists()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "some.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE numbers (number, filler)")
        connection.executemany("INSERT INTO numbers VALUES (?, zeroblob(3000))", [(k,) for k in range(100)])
        connection.commit()
    return path


@pytest.fixture
def watch(path: Path) -> Iterator[FileWatch]:
    watch = FileWatch(path)
    yield watch
    watch.close()


def test_closing_twice_closes_no_handle_of_somebody_else(path: Path) -> None:
    watch = FileWatch(path)
    watch.close()
    other = os.open(path, os.O_RDONLY)  # takes the number that has become free
    watch.close()
    os.close(other)


def test_a_file_in_use_is_in_order_however_it_grows_and_shrinks(path: Path, watch: FileWatch) -> None:
    with (
        closing(sqlite3.connect(path, isolation_level=None)) as connection,
        closing(sqlite3.connect(path, isolation_level=None)) as reader,
    ):
        connection.execute("PRAGMA wal_autocheckpoint = 5")
        for round_ in range(40):
            if round_ % 10 == 3:  # somebody who reads an old state keeps pages from the file
                reader.execute("BEGIN")
                reader.execute("SELECT count(*) FROM numbers").fetchone()
            if round_ % 10 == 9:
                reader.execute("COMMIT")
            connection.execute("INSERT INTO numbers SELECT number, filler FROM numbers LIMIT 50")
            watch.check()
            if round_ % 3 == 0:
                connection.execute("DELETE FROM numbers WHERE rowid % 3 = 0")
                connection.executescript("PRAGMA incremental_vacuum(1000)")
            watch.check()


@pytest.mark.parametrize("size", [0, 50, 4096, 100_000])
def test_a_file_that_was_cut_off_is_damaged(path: Path, watch: FileWatch, size: int) -> None:
    os.truncate(path, size)

    with pytest.raises(FileFaultError, match="is damaged") as caught:
        watch.check()
    assert caught.value.is_final


def test_a_file_that_was_deleted_or_replaced_is_told_apart(path: Path, watch: FileWatch) -> None:
    content = path.read_bytes()
    path.unlink()
    for _ in range(2):
        with pytest.raises(FileFaultError, match="deleted or replaced") as caught:
            watch.check()
        assert caught.value.is_final
        path.write_bytes(content)


async def read_with(database: Database, error: Exception) -> None:
    async with database.read():
        raise error


async def test_what_a_reader_meets_is_known_to_the_writer(tmp_path: Path) -> None:
    database = Database(tmp_path / DATABASE_FILE)
    await database.open()
    error = sqlite3.DatabaseError("malformed")
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    with pytest.raises(FileFaultError, match="is damaged"):
        await read_with(database, error)
    with pytest.raises(FileFaultError, match="is damaged"):
        database.check_file()
    await database.close()
