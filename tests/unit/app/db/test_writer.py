import asyncio
import logging
import shutil
import threading
import time
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import pytest
from sqlalchemy import insert, update

from app.db import writer as writer_module
from app.db.database import DATABASE_FILE, Database
from app.db.faults import FileFaultError
from app.db.migrate import upgrade
from app.db.models import BookmarkRow, SessionRow
from app.db.writer import HistoryWriter
from app.db.writes import Write
from app.errors import HistoryUnavailableError
from tests.support.api import until
from tests.support.history import fetch, fill, lock_held, session_write, small_disk, written_history

NAMES = "SELECT id FROM sessions ORDER BY rowid"


def names_in(path: Path) -> list[str]:
    return [row[0] for row in fetch(path, NAMES)]


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def orphan_bookmark() -> Write:
    row = {"id": "b", "session_id": "nobody", "step": 1, "note": "", "created_ns": 1}
    return Write(insert(BookmarkRow), [row])


async def test_writes_everything_in_order_once(tmp_path: Path) -> None:
    async with written_history(tmp_path) as (database, writer):
        for number in range(500):
            assert writer.put(session_write(f"s{number}"))
        await writer.settle()

        assert names_in(database.path) == [f"s{number}" for number in range(500)]
        assert writer.status.state == "recording"


async def test_settle_does_not_wait_for_what_is_put_later(tmp_path: Path) -> None:
    async with written_history(tmp_path) as (_, writer):

        async def keep_putting() -> None:
            for number in range(100_000):
                writer.put(session_write(f"later{number}"))
                await asyncio.sleep(0)

        putting = asyncio.create_task(keep_putting())
        await asyncio.sleep(0)
        async with asyncio.timeout(10):
            await writer.settle()
        assert not putting.done()
        putting.cancel()


async def test_rows_wait_while_another_process_holds_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.db.database.WRITE_BUSY_MS", 50)
    monkeypatch.setattr(writer_module, "RETRY_S", (0.01,))
    async with written_history(tmp_path) as (database, writer):
        writer.put(session_write("before"))
        await writer.settle()
        with lock_held(database.path):
            for number in range(50):
                writer.put(session_write(f"s{number}"))
            await until(lambda: writer.status.state == "failing")
            assert "Another process holds a lock" in writer.status.reason
            assert names_in(database.path) == ["before"]  # reading goes on
        await writer.settle()

        assert names_in(database.path) == ["before", *(f"s{number}" for number in range(50))]
        assert writer.status.state == "recording"
        assert writer.status.num_lost_writes == 0
    assert len(errors_in(caplog)) == 1


async def test_a_file_that_cannot_be_opened_at_start_is_opened_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "RETRY_S", (0.01,))
    faults = [FileFaultError("Another process has it.")] * 2

    async def upgrade_later(path: Path) -> None:
        if faults:
            raise faults.pop()
        await upgrade(path)

    monkeypatch.setattr("app.db.database.upgrade", upgrade_later)
    async with written_history(tmp_path) as (database, writer):
        writer.put(session_write("s"))
        await writer.settle()

        assert names_in(database.path) == ["s"]
        assert faults == []


async def test_full_disk_is_told_once_and_nothing_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "RETRY_S", (0.01,))
    try:
        with small_disk(tmp_path / "disk", "1500k") as folder:
            async with written_history(folder) as (database, writer):
                writer.put(session_write("before"))
                await writer.settle()
                filler = folder / "filler"
                fill(filler)
                for number in range(40):
                    writer.put(session_write(f"s{number}", note="n" * 9000))
                await until(lambda: writer.status.state == "failing")
                assert "is full" in writer.status.reason
                filler.unlink()
                await writer.settle()

                assert names_in(database.path) == ["before", *(f"s{number}" for number in range(40))]
                assert writer.status.state == "recording"
    except CalledProcessError as refused:
        pytest.skip(f"no file system can be mounted here: {refused.stderr!r}")
    assert len(errors_in(caplog)) == 1


async def test_what_no_longer_fits_is_counted_and_its_owner_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "MAX_QUEUED_PUTS", 3)
    told: list[str] = []
    writer = HistoryWriter(Database(tmp_path / DATABASE_FILE))

    taken = [
        writer.put(session_write(f"s{number}", num_steps=2, on_lost=lambda: told.append("lost")))
        for number in range(5)
    ]

    assert taken == [True, True, True, False, False]
    assert (writer.status.num_lost_writes, writer.status.num_lost_steps) == (2, 4)
    assert told == ["lost", "lost"]
    assert len(errors_in(caplog)) == 1


async def test_the_queue_is_bounded_by_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "MAX_QUEUED_BYTES", 10_000)
    writer = HistoryWriter(Database(tmp_path / DATABASE_FILE))
    large = session_write("large", note="n" * 6000)

    assert writer.put(large)
    assert not writer.put(large)
    assert writer.put(session_write("small"))


async def test_a_refused_row_takes_only_its_own_transaction_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with written_history(tmp_path) as (database, writer):
        for number in range(10):
            writer.put(session_write(f"s{number}"))
            if number % 3 == 0:
                writer.put(session_write(f"with{number}"), orphan_bookmark())
        writer.put(Write(update(SessionRow).where(SessionRow.id == "s1").values(note=2**70)))
        await writer.settle()

        assert names_in(database.path) == [f"s{number}" for number in range(10)]
        assert writer.status.num_lost_writes == 9  # four pairs, one update
        assert writer.status.state == "recording"
    assert len(errors_in(caplog)) == 1
    assert "nobody" not in caplog.text  # values of rows may be prompts


async def test_deleted_file_ends_recording_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "CHECK_FILE_S", 0.01)
    async with written_history(tmp_path) as (database, writer):
        await writer.settle()
        await until(lambda: writer.status.state == "recording")
        for suffix in ("", "-wal", "-shm"):
            database.path.with_name(DATABASE_FILE + suffix).unlink(missing_ok=True)
        writer.put(session_write("late"))
        await until(lambda: writer.status.state == "off")

        assert "was deleted" in writer.status.reason
        assert not writer.put(session_write("later"))
        with pytest.raises(HistoryUnavailableError, match="was deleted"):
            async with database.read():
                pass
    assert len(errors_in(caplog)) == 1


async def test_damage_that_shows_while_running_ends_recording(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with written_history(tmp_path) as (database, writer):
        for number in range(200):
            writer.put(session_write(f"s{number}", note="n" * 2000))
        await writer.settle()
    shutil.copy(database.path, tmp_path / "sound.db")
    damage(database.path)
    async with written_history(tmp_path) as (database, writer):
        await until(lambda: writer.status.state == "recording")
        writer.put(Write(update(SessionRow).values(note="x")))
        await until(lambda: writer.status.state == "off")

        assert "is damaged" in writer.status.reason
        assert "Move it away and restart" in writer.status.reason
    assert len(errors_in(caplog)) == 1


def damage(path: Path) -> None:
    """Overwrite the pages behind the schema's own ones."""
    content = bytearray(path.read_bytes())
    start = len(content) // 2
    content[start : start + 200_000] = b"\xa5" * min(200_000, len(content) - start)
    path.write_bytes(content)


@pytest.mark.parametrize("content", [b"this is no database, whatever its name says" * 100, bytes(100)])
async def test_a_damaged_file_at_start_turns_the_history_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    (tmp_path / DATABASE_FILE).write_bytes(content)
    async with written_history(tmp_path) as (_, writer):
        writer.put(session_write("s"))
        await until(lambda: writer.status.state == "off")

        assert "is damaged" in writer.status.reason
        assert writer.status.num_lost_writes == 1
    assert (tmp_path / DATABASE_FILE).read_bytes() == content
    assert len(errors_in(caplog)) == 1


async def test_a_folder_that_takes_no_files_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "RETRY_S", (0.01,))
    blocked = tmp_path / "folder"
    blocked.write_text("in the way")
    async with written_history(blocked) as (database, writer):
        writer.put(session_write("s"))
        await until(lambda: writer.status.state == "failing")
        blocked.unlink()
        await writer.settle()

        assert names_in(database.path) == ["s"]


async def test_stopping_does_not_wait_for_ever_and_counts_what_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    database = Database(tmp_path / DATABASE_FILE)
    writer = HistoryWriter(database)
    writer.start()
    await until(lambda: writer.status.state == "recording")
    with lock_held(database.path):
        writer.put(session_write("s"), session_write("t"))
        started = time.monotonic()
        await writer.stop(0.2)
        assert time.monotonic() - started < 5

    assert writer.status.num_lost_writes == 2
    assert "The history is not complete: 2 rows" in caplog.text


async def test_what_is_being_written_when_the_time_to_stop_is_over_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    write = writer_module._write_batch

    def write_slowly(*args: Any) -> None:
        begun.set()
        assert may_end.wait(20)
        write(*args)

    monkeypatch.setattr(writer_module, "_write_batch", write_slowly)
    database = Database(tmp_path / DATABASE_FILE)
    writer = HistoryWriter(database, flush_s=0.0)
    writer.start()
    writer.put(session_write("s"))
    await asyncio.to_thread(begun.wait, 20)
    writer.put(session_write("t"))
    stopping = asyncio.create_task(writer.stop(0.0))
    for _ in range(5):
        await asyncio.sleep(0)
    may_end.set()
    await stopping

    assert names_in(database.path) == ["s"]
    assert writer.status.num_lost_writes == 1
    assert "The history is not complete: 1 rows" in caplog.text


async def test_stopping_writes_what_is_queued(tmp_path: Path) -> None:
    database = Database(tmp_path / DATABASE_FILE)
    writer = HistoryWriter(database, flush_s=60.0)
    writer.start()
    writer.put(session_write("s"))
    await writer.stop(10.0)

    assert names_in(database.path) == ["s"]
    with pytest.raises(HistoryUnavailableError, match="shutting down"):
        async with database.read():
            pass


async def test_who_waits_is_not_kept_until_more_comes_together(tmp_path: Path) -> None:
    database = Database(tmp_path / DATABASE_FILE)
    writer = HistoryWriter(database, flush_s=3600.0)
    writer.start()
    await until(lambda: writer.status.state == "recording")
    async with asyncio.timeout(60):
        for name in ("s", "t"):
            writer.put(session_write(name))
            for _ in range(20):  # the writer's pause begins
                await asyncio.sleep(0)
            await writer.settle()

            assert name in names_in(database.path)
    await writer.stop(10.0)


async def test_what_puts_the_file_in_order_comes_before_the_first_row(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    async def look(database: Database) -> None:
        await database.write(lambda _: seen.append(names_in(database.path)))

    writer = HistoryWriter(Database(tmp_path / DATABASE_FILE))
    writer.add_on_open(look)
    writer.put(session_write("s"))
    writer.start()
    await writer.settle()
    await writer.stop(5.0)

    assert seen == [[]]


async def test_what_puts_the_file_in_order_is_tried_again_while_the_file_is_locked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "RETRY_S", (0.01,))
    outcomes: list[Exception | None] = [FileFaultError("locked"), ValueError("a bug")]

    async def put_in_order(_: Database) -> None:
        error = outcomes.pop(0)
        if error is not None:
            raise error

    writer = HistoryWriter(Database(tmp_path / DATABASE_FILE))
    writer.add_on_open(put_in_order)
    writer.put(session_write("s"))
    writer.start()
    await writer.settle()
    await writer.stop(5.0)

    assert outcomes == []
    assert names_in(tmp_path / DATABASE_FILE) == ["s"]
    assert "could not be put in order" in caplog.text
