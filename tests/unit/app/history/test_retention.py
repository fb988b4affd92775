import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Executable, func, insert, select, update

from app.db.database import Database, check_integrity
from app.db.models import (
    ChunkRow,
    ConversationRow,
    KeyframeRow,
    MessageRow,
    MetricRow,
    RequestEventRow,
    RequestRow,
    RequestTextRow,
    SessionRow,
)
from app.db.writer import HistoryWriter
from app.db.writes import Write
from app.history import deletion as deletion_module
from app.history import retention as retention_module
from app.history.retention import Retention, Usage
from tests.support.history import fetch, session_write, value_for, written_history

CHUNK_BYTES = 20_000
RUNNING = "running"
MIB = 2**20


class History:
    """A history with sessions of 256-step chunks, each as large as `CHUNK_BYTES`."""

    def __init__(self, database: Database, writer: HistoryWriter) -> None:
        self.database = database
        self.writer = writer
        self._num_events = 0

    async def add_session(self, name: str, num_chunks: int, *, started_ns: int = 1, **values: Any) -> None:
        last_step = values.pop("last_step", 256 * num_chunks)
        row = session_write(name, started_ns=started_ns, last_step=last_step, **values)
        self.writer.put(row)
        for k in range(num_chunks):
            self._put_chunk(name, k, min(256, last_step - 256 * k))
        await self.writer.settle()

    async def add_chunk(self, name: str, k: int) -> None:
        """Go on with a session by 256 steps."""
        self._put_chunk(name, k, 256)
        await self.execute(update(SessionRow).where(SessionRow.id == name).values(last_step=256 * (k + 1)))

    def _put_chunk(self, name: str, k: int, num_steps: int) -> None:
        chunk = {
            "session_id": name,
            "first_step": 256 * k + 1,
            "num_steps": num_steps,
            "first_ns": k,
            "last_ns": k + 1,
            "records": bytes(CHUNK_BYTES),
        }
        self.writer.put(Write(insert(ChunkRow), [chunk]))
        if num_steps == 256:
            state = {"session_id": name, "step": 256 * (k + 1), "is_base": False, "state": b"s"}
            self.writer.put(Write(insert(KeyframeRow), [state]))

    async def add_request(self, name: str, arrived: int, ended: int | None) -> None:
        """Add a request with its text, an event and the second it was in; an end or none."""
        request = f"{name}-{arrived}"
        last_step = arrived if ended is None else ended
        self._num_events += 1
        self.writer.put(
            row_of(RequestRow, id=request, session_id=name, arrived_step=arrived, ended_step=ended),
            row_of(RequestTextRow, request_id=request, prompt="p" * 5000),
            row_of(RequestEventRow, session_id=name, seq=self._num_events, request_id=request, step=arrived),
        )
        self.writer.put(row_of(MetricRow, session_id=name, second=arrived, last_step=last_step))
        await self.writer.settle()

    async def execute(self, statement: Executable) -> None:
        self.writer.put(Write(statement))
        await self.writer.settle()

    async def without_steps(self) -> Usage:
        """Return what would be used if the steps that may go were gone."""
        while True:
            async with self.database.read() as session:
                cut = await self.retention(0)._find_cut(session, MIB)
            if cut is None:
                return await self.retention(0).measure()
            await self.retention(0)._cut(cut)

    def requests(self, name: str) -> list[int]:
        """Return the arrival steps of the session's requests: first what was put in late."""
        rows = fetch(
            self.database.path,
            "SELECT arrived_step FROM requests WHERE session_id = ? "
            "ORDER BY arrived_step NOT IN (3, 4), arrived_step",
            name,
        )
        return [step for (step,) in rows]

    def events(self, name: str) -> set[int]:
        rows = fetch(self.database.path, "SELECT step FROM request_events WHERE session_id = ?", name)
        return {step for (step,) in rows}

    def seconds(self, name: str) -> list[int]:
        rows = fetch(
            self.database.path,
            "SELECT second FROM metrics WHERE session_id = ? ORDER BY second NOT IN (3, 4), second",
            name,
        )
        return [second for (second,) in rows]

    async def shrink_to(self, share: float) -> None:
        """Shrink with a limit of this share of what is used now."""
        limit = int((await self.retention(0).measure()).used_bytes * share)
        await self.retention(limit).shrink()

    def retention(self, limit: int) -> Retention:
        return Retention(self.database, self.writer, RUNNING, limit)

    def steps(self, name: str) -> tuple[int, list[int], list[tuple[int, int]]]:
        """Return first step, first steps of the chunks, and (step, is_base) of the states."""
        [(first,)] = fetch(self.database.path, "SELECT first_step FROM sessions WHERE id = ?", name)
        chunks = fetch(
            self.database.path, "SELECT first_step FROM chunks WHERE session_id = ? ORDER BY 1", name
        )
        states = fetch(
            self.database.path, "SELECT step, is_base FROM keyframes WHERE session_id = ? ORDER BY 1", name
        )
        return first, [step for (step,) in chunks], [(step, base) for step, base in states]

    def names(self) -> list[str]:
        return [name for (name,) in fetch(self.database.path, "SELECT id FROM sessions ORDER BY started_ns")]


@pytest.fixture
async def history(tmp_path: Path) -> AsyncIterator[History]:
    async with written_history(tmp_path) as (database, writer):
        yield History(database, writer)
    assert check_integrity(database.path) == "ok"


async def test_nothing_goes_below_the_limit(history: History) -> None:
    await history.add_session("old", 4)
    await history.shrink_to(1.01)

    assert history.steps("old")[0] == 1


async def test_the_oldest_steps_go_first_up_to_a_state_that_becomes_the_new_start(history: History) -> None:
    await history.add_session("old", 10, started_ns=1)
    await history.add_session("new", 10, started_ns=2)
    await history.shrink_to(0.9)

    first, chunks, states = history.steps("old")
    assert 1 < first <= 256 * 9 + 1
    assert first % 256 == 1
    assert chunks == list(range(first, 256 * 10, 256))
    assert states[0] == (first - 1, 1)
    assert [base for _, base in states[1:]] == [0] * (len(states) - 1)
    assert history.steps("new")[0] == 1


async def test_a_whole_session_of_steps_goes_before_the_next_one_is_touched(history: History) -> None:
    await history.add_session("old", 5, started_ns=1)
    await history.add_session("new", 10, started_ns=2)
    await history.shrink_to(0.6)

    assert history.steps("old") == (5 * 256 + 1, [], [])
    first, chunks, _ = history.steps("new")
    assert first > 1
    assert chunks[0] == first
    assert history.names() == ["old", "new"]


async def test_a_short_session_without_a_state_goes_whole(history: History) -> None:
    await history.add_session("short", 1, last_step=40)
    await history.add_session("new", 10, started_ns=2)
    await history.shrink_to(0.99)

    assert history.steps("short") == (41, [], [])


async def test_starred_sessions_keep_their_steps(history: History) -> None:
    await history.add_session("starred", 10, started_ns=1, is_starred=True)
    await history.add_session("other", 10, started_ns=2)
    await history.shrink_to(0.8)

    assert history.steps("starred")[0] == 1
    assert history.steps("other")[0] > 1


async def test_the_running_session_gives_up_old_steps_and_keeps_its_newest(history: History) -> None:
    await history.add_session(RUNNING, 10, last_step=256 * 9 + 10)
    await history.retention(1).shrink()

    first, chunks, states = history.steps(RUNNING)
    assert first == 256 * 5 + 1
    assert first + retention_module.KEPT_STEPS <= 256 * 9 + 10
    assert chunks == [256 * k + 1 for k in range(5, 10)]
    assert states == [(256 * k, k == 5) for k in range(5, 10)]


@pytest.mark.parametrize("num_chunks", [1, 4])
async def test_a_running_session_that_is_young_is_left_alone(history: History, num_chunks: int) -> None:
    await history.add_session(RUNNING, num_chunks)
    await history.retention(1).shrink()

    assert history.steps(RUNNING)[0] == 1


async def test_large_states_count(history: History) -> None:
    await history.add_session("old", 20)
    await history.execute(update(KeyframeRow).values(state=bytes(50 * CHUNK_BYTES)))
    await history.shrink_to(0.95)

    first, chunks, _ = history.steps("old")
    assert (first, len(chunks)) == (256 * 4 + 1, 16)  # a tenth and some more; without states all would go


async def test_requests_older_than_the_steps_that_are_left_go_oldest_first(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletion_module, "PIECE_REQUESTS", 2)
    monkeypatch.setattr(retention_module, "TARGET_SHARE", 1.0)
    await history.add_session("old", 2, started_ns=5)
    await history.add_session(RUNNING, 10, started_ns=1)
    for name, num_steps in (("old", 512), (RUNNING, 2560)):
        for step in range(1, num_steps + 1, 64):
            await history.add_request(name, step, step + 10)
    await history.add_request(RUNNING, 3, None)  # goes on
    await history.add_request(RUNNING, 4, 2550)  # a long one
    size = (await history.retention(0).measure()).used_bytes
    bare = (await history.without_steps()).used_bytes

    await history.retention(bare - 8192).shrink()
    old, running = history.requests("old"), history.requests(RUNNING)
    assert 0 < len(old) < 8
    assert min(old) > 1
    assert len(running) == 42

    await history.retention(1).shrink()
    first = history.steps(RUNNING)[0]
    assert history.names() == [RUNNING]
    assert history.requests(RUNNING) == [3, 4, *(k for k in range(1, 2561, 64) if k + 10 >= first)]
    assert history.events(RUNNING) == {3, 4, *(k for k in range(1, 2561, 64) if k + 10 >= first)}
    assert history.seconds(RUNNING) == [4, *(k for k in range(1, 2561, 64) if k + 10 >= first)]
    assert (await history.retention(0).measure()).used_bytes < size * 0.6


async def test_the_limit_holds_while_a_session_goes_on(history: History) -> None:
    limit = 2 * MIB
    retention = history.retention(limit)
    await history.add_session(RUNNING, 0)
    for chunk in range(60):
        await history.add_chunk(RUNNING, chunk)
        for step in range(256 * chunk + 1, 256 * chunk + 257, 16):
            await history.add_request(RUNNING, step, step + 100)
        await retention.shrink()
        assert (await retention.measure()).used_bytes <= limit

    first = history.steps(RUNNING)[0]
    assert 256 * 40 < first <= 256 * 56 + 1
    assert history.requests(RUNNING)[-1] > 256 * 59


async def test_old_sessions_go_with_their_requests_when_steps_were_not_enough(
    history: History, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(deletion_module, "PIECE_ROWS", 3)
    monkeypatch.setattr(deletion_module, "PIECE_REQUESTS", 3)
    for number, name in enumerate(("old", "starred", RUNNING)):
        await history.add_session(name, 1, started_ns=number, is_starred=name == "starred")
        for step in range(1, 9):
            await history.add_request(name, step, None)
    history.writer.put(row_of(ConversationRow, id="c"), row_of(MessageRow, conversation_id="c", id="m"))
    await history.writer.settle()
    retention = history.retention(1)
    await retention.shrink()
    await retention.shrink()

    assert history.names() == ["starred", RUNNING]
    path = history.database.path
    for table in ("requests", "request_events", "metrics"):
        found = fetch(path, f"SELECT session_id, count(*) FROM {table} GROUP BY 1 ORDER BY 1")  # noqa: S608
        assert found == [(RUNNING, 8), ("starred", 8)], table
    assert fetch(path, "SELECT count(*) FROM request_texts") == [(16,)]
    assert fetch(path, "SELECT id FROM messages") == [("m",)]
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1


async def test_a_session_is_deleted_in_pieces_that_leave_sense(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletion_module, "PIECE_BYTES", 3 * CHUNK_BYTES)
    monkeypatch.setattr(deletion_module, "PIECE_REQUESTS", 2)
    await history.add_session("old", 10)
    await history.add_session("other", 3, started_ns=2)
    for name in ("old", "other"):
        for step in range(1, 6):
            await history.add_request(name, step, step + 1)
    seen: list[tuple[int, int, int]] = []
    write = history.database.write

    async def watched_write(work: Callable[[Connection], Any]) -> Any:
        result = await write(work)
        if "old" in history.names():
            first, chunks, _ = history.steps("old")
            seen.append((first, len(chunks), len(history.requests("old"))))
        return result

    monkeypatch.setattr(history.database, "write", watched_write)
    await deletion_module.delete_session(history.database, "old")

    assert seen[:5] == [(2561, 10, 5), (2561, 7, 5), (2561, 4, 5), (2561, 1, 5), (2561, 0, 5)]
    assert [left for _, _, left in seen[6:9]] == [3, 1, 0]
    assert history.names() == ["other"]
    assert history.steps("other")[0] == 1
    for table in ("requests", "request_events", "metrics", "request_texts"):
        assert fetch(history.database.path, f"SELECT count(*) FROM {table}") == [(5,)]  # noqa: S608


def row_of(model: Any, **values: Any) -> Write:
    row = {column.name: value_for(column) for column in model.__table__.columns}
    return Write(insert(model), [{**row, **values}])


async def test_pages_are_given_back_to_the_file_system(history: History) -> None:
    await history.add_session("old", 200)
    await history.add_session("new", 2, started_ns=2)
    await history.retention(MIB).shrink()

    usage = await history.retention(MIB).measure()
    assert usage.used_bytes <= MIB
    assert usage.free_pages <= retention_module.MIN_FREE_PAGES
    async with history.database.read() as session:
        assert await session.scalar(select(func.count()).select_from(SessionRow)) == 2


async def test_what_is_written_meanwhile_arrives(history: History) -> None:
    await history.add_session("old", 100)
    retention = history.retention(MIB)
    retention.start()
    for number in range(50):
        history.writer.put(session_write(f"s{number}", started_ns=9))
    await history.writer.settle()
    await retention.stop()

    assert len(history.names()) == 51


async def test_it_looks_by_itself_after_the_start(history: History) -> None:
    await history.add_session("old", 100)
    retention = history.retention(MIB)
    retention.start()
    async with asyncio.timeout(10):
        while (await retention.measure()).used_bytes > MIB:
            await asyncio.sleep(0.01)
    await retention.stop()
