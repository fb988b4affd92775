"""Who reads the history finds what has happened, and is never kept for long."""

import asyncio
import threading
from pathlib import Path

import pytest
from sqlalchemy import Connection, select

from app.db import writer as writer_module
from app.db.database import DATABASE_FILE, Database
from app.db.faults import FileFaultError
from app.db.models import SessionRow
from app.db.writer import HistoryWriter
from app.db.writes import Write
from tests.support.api import until
from tests.support.history import fetch, lock_held, session_write, written_history

HOUR_S = 3600.0


async def read_names(database: Database) -> set[str]:
    async with asyncio.timeout(60), database.read() as session:
        return set((await session.execute(select(SessionRow.id))).scalars())


async def begin(folder: Path) -> tuple[Database, HistoryWriter]:
    """Return a writer that writes when it is hurried."""
    database = Database(folder / DATABASE_FILE)
    writer = HistoryWriter(database, flush_s=HOUR_S)
    writer.start()
    await until(lambda: writer.status.state == "recording")
    return database, writer


class Holder:
    """Holds writes back until the writer asks for them."""

    def __init__(self, writer: HistoryWriter, *writes: Write) -> None:
        self.writes = list(writes)
        self.num_asked = 0
        self._writer = writer
        writer.add_holder(self._flush)

    def _flush(self) -> None:
        self.num_asked += 1
        while self.writes:
            self._writer.put(self.writes.pop())


class SlowWork:
    """Holds the thread that writes until it is told to end."""

    def __init__(self, database: Database) -> None:
        self._may_end = threading.Event()
        self._task = asyncio.create_task(database.write(self._work))

    def _work(self, _connection: Connection) -> None:
        assert self._may_end.wait(60)

    async def end(self) -> None:
        self._may_end.set()
        await self._task


async def test_who_reads_finds_what_was_put_and_what_was_held_back(tmp_path: Path) -> None:
    database, writer = await begin(tmp_path)
    Holder(writer, session_write("held back"))
    writer.put(session_write("put"))

    assert await read_names(database) == {"put", "held back"}
    await writer.stop(5.0)


async def test_two_who_read_one_after_the_other_both_find_everything(tmp_path: Path) -> None:
    database, writer = await begin(tmp_path)
    slow = SlowWork(database)
    writer.put(session_write("a"))
    first = asyncio.create_task(writer.settle())
    await until(writer._writing.locked)
    writer.put(session_write("b"))
    second = asyncio.create_task(writer.settle())
    await asyncio.sleep(0)
    await slow.end()
    async with asyncio.timeout(60):
        await asyncio.gather(first, second)

    assert await read_names(database) == {"a", "b"}
    await writer.stop(5.0)


async def test_being_hurried_once_is_not_being_hurried_for_ever(tmp_path: Path) -> None:
    database, writer = await begin(tmp_path)
    for name in ("a", "b"):
        writer.put(session_write(name))
        await read_names(database)
    writer.put(session_write("c"))
    for _ in range(2):
        for _ in range(20):
            await asyncio.sleep(0)
        await database.write(lambda _: None)  # behind what the writer may have begun

    assert writer.status.num_queued == 1, "it waits for company"
    await writer.stop(5.0)


async def test_what_is_held_back_goes_with_what_is_written(tmp_path: Path) -> None:
    async with written_history(tmp_path) as (database, writer):
        Holder(writer, session_write("held back"))
        writer.put(session_write("put"))
        await writer.settle()

        # Past the writer: who reads through it has what is held back put.
        assert fetch(database.path, "SELECT id FROM sessions ORDER BY id") == [("held back",), ("put",)]


async def test_a_holder_that_fails_harms_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    database, writer = await begin(tmp_path)
    writer.add_holder(fail)
    Holder(writer, session_write("held back"))
    writer.put(session_write("put"))

    assert await read_names(database) == {"put", "held back"}
    assert writer.status.state == "recording"
    assert "could not be put" in caplog.text
    await writer.stop(5.0)


async def test_who_reads_while_nothing_can_be_written_is_kept_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "CATCH_UP_S", 0.01)
    database, writer = await begin(tmp_path)
    writer.put(session_write("before"))
    assert await read_names(database) == {"before"}
    slow = SlowWork(database)
    writer.put(session_write("meanwhile"))
    assert await read_names(database) == {"before"}

    monkeypatch.setattr(writer_module, "CATCH_UP_S", HOUR_S)
    assert await read_names(database) == {"before"}
    await slow.end()
    async with asyncio.timeout(60):
        await writer.settle()
    assert await read_names(database) == {"before", "meanwhile"}
    writer.put(session_write("after"))
    assert await read_names(database) == {"before", "meanwhile", "after"}
    await writer.stop(5.0)


async def test_after_a_failure_nobody_waits_and_nothing_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "CATCH_UP_S", HOUR_S)
    async with written_history(tmp_path) as (database, writer):
        writer.put(session_write("before"))
        await writer.settle()
        holder = Holder(writer)
        with lock_held(database.path):
            writer.put(session_write("meanwhile"))
            await until(lambda: writer.status.state == "failing")
            num_asked = holder.num_asked
            assert await read_names(database) == {"before"}
            assert holder.num_asked == num_asked
        await writer.settle()
        assert await read_names(database) == {"before", "meanwhile"}


async def test_on_another_loop_what_is_held_back_is_left_alone(tmp_path: Path) -> None:
    database, writer = await begin(tmp_path)
    holder = Holder(writer, session_write("held back"))
    writer.put(session_write("put"))
    async with asyncio.timeout(60):
        await asyncio.to_thread(lambda: asyncio.run(writer.catch_up()))
        assert holder.num_asked <= 1, "by the writer, not by the reader"
    assert await read_names(database) == {"put", "held back"}
    await writer.stop(5.0)


async def test_a_connection_that_met_a_fault_is_not_used_again(tmp_path: Path) -> None:
    database, writer = await begin(tmp_path)
    await database.write(lambda _: None)
    assert database._writer is not None
    assert database._writer.engine.pool.status().count("Connections in pool: 1") == 1
    with lock_held(database.path), pytest.raises(FileFaultError, match="holds a lock"):
        await database.write(lambda _: None)
    assert database._writer.engine.pool.status().count("Connections in pool: 0") == 1
    await writer.stop(5.0)
