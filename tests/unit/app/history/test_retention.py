import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, insert, select

from app.db.database import Database, check_integrity
from app.db.models import (
    ChunkRow,
    ConversationRow,
    KeyframeRow,
    MessageRow,
    MetricRow,
    RequestRow,
    RequestTextRow,
    SessionRow,
)
from app.db.writer import HistoryWriter, Write
from app.history import retention as retention_module
from app.history.retention import Retention
from tests.support.history import fetch, session_write, value_for, written_history

CHUNK_BYTES = 20_000
RUNNING = "running"
MIB = 2**20


class History:
    """A history with sessions of 256-step chunks, each as large as `CHUNK_BYTES`."""

    def __init__(self, database: Database, writer: HistoryWriter) -> None:
        self.database = database
        self.writer = writer

    async def add_session(self, name: str, num_chunks: int, *, started_ns: int = 1, **values: Any) -> None:
        last_step = values.pop("last_step", 256 * num_chunks)
        row = session_write(name, started_ns=started_ns, last_step=last_step, **values)
        chunks = [
            {
                "session_id": name,
                "first_step": 256 * k + 1,
                "num_steps": min(256, last_step - 256 * k),
                "first_ns": k,
                "last_ns": k + 1,
                "records": bytes(CHUNK_BYTES),
            }
            for k in range(num_chunks)
        ]
        states = [
            {"session_id": name, "step": 256 * k, "is_base": False, "state": b"s"}
            for k in range(1, last_step // 256 + 1)
        ]
        self.writer.put(row)
        if chunks:
            self.writer.put(Write(insert(ChunkRow), chunks))
        if states:
            self.writer.put(Write(insert(KeyframeRow), states))
        await self.writer.settle()

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


async def test_the_running_session_gives_up_old_steps_and_keeps_a_start(history: History) -> None:
    await history.add_session(RUNNING, 10, last_step=256 * 9 + 10)
    await history.retention(1).shrink()

    first, chunks, states = history.steps(RUNNING)
    assert (first, chunks) == (256 * 9 + 1, [256 * 9 + 1])
    assert states == [(256 * 9, 1)]


async def test_the_running_session_without_a_state_is_left_alone(history: History) -> None:
    await history.add_session(RUNNING, 1, last_step=40)
    await history.retention(1).shrink()

    assert history.steps(RUNNING)[0] == 1


async def test_old_sessions_go_with_their_requests_when_steps_were_not_enough(
    history: History, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retention_module, "DELETE_ROWS", 3)
    for number, name in enumerate(("old", "starred", RUNNING)):
        await history.add_session(name, 1, started_ns=number, is_starred=name == "starred")
        for index in range(8):
            request = f"{name}-{index}"
            history.writer.put(
                row_of(RequestRow, id=request, session_id=name),
                row_of(RequestTextRow, request_id=request, prompt="p" * 5000),
                row_of(MetricRow, session_id=name, second=index),
            )
    history.writer.put(row_of(ConversationRow, id="c"), row_of(MessageRow, conversation_id="c", id="m"))
    await history.writer.settle()
    retention = history.retention(1)
    await retention.shrink()
    await retention.shrink()

    assert history.names() == ["starred", RUNNING]
    path = history.database.path
    kept = [(RUNNING, 8), ("starred", 8)]
    assert fetch(path, "SELECT session_id, count(*) FROM requests GROUP BY 1 ORDER BY 1") == kept
    assert fetch(path, "SELECT session_id, count(*) FROM metrics GROUP BY 1 ORDER BY 1") == kept
    assert fetch(path, "SELECT count(*) FROM request_texts") == [(16,)]
    assert fetch(path, "SELECT id FROM messages") == [("m",)]
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1


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
    async with history.database.write() as connection:
        assert (await connection.execute(select(func.count()).select_from(SessionRow))).scalar() == 2


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
