"""What a process that died left open is ended at the next start; what is whole stays as it is."""

import logging
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from sqlalchemy import delete, insert, update

from app.db.database import DATABASE_FILE, Database
from app.db.models import (
    Base,
    ChunkRow,
    ConversationRow,
    KeyframeRow,
    MessageRow,
    RequestEventRow,
    RequestRow,
    SessionRow,
)
from app.history.crash_repair import repair_after_crash
from app.history.record_codec import encode_plain, encode_state
from engine.config import EngineConfig
from engine.records import StepRecord
from engine.snapshot import EngineSnapshot
from tests.support.history import execute, fetch, session_values
from tests.support.recording import make_run

CHUNK = {"num_steps": 1, "records": b""}
REQUEST = {
    "kind": "api",
    "arrived_ns": 1,
    "arrived_step": 1,
    "num_choices": 1,
    "max_tokens": 1,
    "num_prompt_tokens": 1,
    "params": "{}",
}
MESSAGE = {
    "conversation_id": "c",
    "variant": 0,
    "role": "assistant",
    "text": "half",
    "created_ns": 1,
    "stats": "{}",
}


async def write_rows(database: Database, rows: list[tuple[type[Base], dict[str, Any]]]) -> None:
    await execute(database, *(insert(table).values(**values) for table, values in rows))


def make_rows() -> list[tuple[type[Base], dict[str, Any]]]:
    """Return what is in the file of a server that died, and of the one that has just begun."""
    chunk = {"session_id": "died", "first_ns": 0, **CHUNK}
    return [
        (SessionRow, session_values("died", 10, last_step=2)),
        (SessionRow, session_values("died at once", 20)),
        (SessionRow, session_values("ended", 5, ended_ns=7, ended_how="stopped")),
        (SessionRow, session_values("this one", 30)),
        (ChunkRow, {**chunk, "first_step": 1, "last_ns": 11}),
        (ChunkRow, {**chunk, "first_step": 2, "last_ns": 15}),
        *(
            (
                RequestRow,
                {**REQUEST, "id": f"{session} {status}", "session_id": session, "status": status},
            )
            for session in ("died", "this one")
            for status in ("waiting", "running", "finished", "failed")
        ),
        (
            ConversationRow,
            {"id": "c", "created_ns": 1, "updated_ns": 1, "title": "", "system_prompt": "", "params": ""},
        ),
        (MessageRow, {**MESSAGE, "id": "half", "position": 1, "status": "streaming"}),
        (MessageRow, {**MESSAGE, "id": "whole", "position": 3, "status": "complete"}),
    ]


async def test_open_sessions_requests_and_answers_end_as_interrupted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / DATABASE_FILE
    database = Database(path)
    await database.open()
    await write_rows(database, make_rows())
    with caplog.at_level(logging.WARNING):
        await repair_after_crash(database, "this one")
        await repair_after_crash(database, "this one")
    await database.close()
    assert fetch(path, "SELECT id, ended_how, ended_ns FROM sessions ORDER BY started_ns") == [
        ("ended", "stopped", 7),
        ("died", "interrupted", 15),
        ("died at once", "interrupted", 20),
        ("this one", None, None),
    ]
    assert dict(fetch(path, "SELECT id, status FROM requests")) == {
        "died waiting": "interrupted",
        "died running": "interrupted",
        "died finished": "finished",
        "died failed": "failed",
        **{f"this one {status}": status for status in ("waiting", "running", "finished", "failed")},
    }
    ends = "SELECT ended_step, ended_ns FROM requests WHERE status = 'interrupted'"
    assert fetch(path, ends) == [(2, 15), (2, 15)], "what has no readable records ends with the last step"
    assert dict(fetch(path, "SELECT id, status FROM messages")) == {
        "half": "interrupted",
        "whole": "complete",
    }
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "The last run did not end in order: 2 sessions, 2 requests and 1 messages are interrupted"
    ]


class Dead(NamedTuple):
    """A session whose records end after step `last`, and its open requests as they were after `seen`."""

    config: EngineConfig
    records: list[StepRecord]
    last: int
    seen: int


async def bury(database: Database, dead: Dead, *, keyframe_at: int = 0, config: bool = True) -> None:
    """Write what a server left that died: rows that are older than the records, events that are newer."""
    snapshot, state, rows = EngineSnapshot(dead.config), None, []
    for record in dead.records[: dead.seen]:
        snapshot.apply(record)
        if record.step == keyframe_at:
            state = encode_state(snapshot.export_state())
    for view in snapshot.sequences.values():
        values = {**REQUEST, "id": view.request_id, "session_id": "died", "status": "running"}
        rows.append((RequestRow, {**values, "num_output_tokens": min(1, view.num_output_tokens)}))
    kept = dead.records[keyframe_at : dead.last]
    chunk = {"session_id": "died", "first_ns": 0, "num_steps": 1}
    told = msgspec.json.encode(dead.config).decode() if config else None
    await write_rows(
        database,
        [
            (SessionRow, session_values("died", 10, config=told, last_step=dead.last)),
            *rows,
            *(
                (
                    ChunkRow,
                    {
                        **chunk,
                        "first_step": record.step,
                        "last_ns": record.t_ns,
                        "records": encode_plain([record]),
                    },
                )
                for record in kept
            ),
        ],
    )
    if state is not None:
        keyframe = {"session_id": "died", "step": keyframe_at, "is_base": False, "state": state}
        await write_rows(database, [(KeyframeRow, keyframe)])


@pytest.mark.parametrize("keyframe_at", [0, 40])
async def test_open_requests_get_the_tokens_and_the_time_of_the_last_record(
    tmp_path: Path, keyframe_at: int
) -> None:
    config, records = make_run(3, 60)
    snapshot = EngineSnapshot(config)
    for record in records:
        snapshot.apply(record)
    tokens = {view.request_id: view.num_output_tokens for view in snapshot.sequences.values()}
    database = Database(tmp_path / DATABASE_FILE)
    await database.open()
    await bury(database, Dead(config, records, 60, 60), keyframe_at=keyframe_at)
    await repair_after_crash(database, "this one")
    await database.close()
    last = records[-1]
    end_ns = last.t_ns + last.schedule_ns + last.forward_ns + last.sample_ns + last.host_ns
    found = fetch(
        tmp_path / DATABASE_FILE, "SELECT id, num_output_tokens, ended_step, ended_ns FROM requests"
    )
    assert found == [(request_id, count, 60, end_ns) for request_id, count in tokens.items()]
    assert max(tokens.values()) > 1


async def test_events_that_are_newer_than_the_last_record_count(tmp_path: Path) -> None:
    config, records = make_run(3, 60)
    snapshot = EngineSnapshot(config)
    for record in records[:50]:
        snapshot.apply(record)
    view = max(snapshot.sequences.values(), key=lambda view: view.num_output_tokens)
    database = Database(tmp_path / DATABASE_FILE)
    await database.open()
    await bury(database, Dead(config, records, 50, 50))
    event = {"session_id": "died", "seq": 1, "request_id": view.request_id, "seq_id": view.seq_id}
    detail = msgspec.json.encode({"num_output_tokens": view.num_output_tokens + 2}).decode()
    event |= {"choice_index": view.choice_index, "step": 52, "t_ns": 2**62}
    await write_rows(database, [(RequestEventRow, {**event, "kind": "finished", "detail": detail})])
    await repair_after_crash(database, "this one")
    await database.close()
    query = "SELECT num_output_tokens, ended_step, ended_ns FROM requests WHERE id = ?"
    assert fetch(tmp_path / DATABASE_FILE, query, view.request_id) == [
        (view.num_output_tokens + 2, 52, 2**62)
    ]


@pytest.mark.parametrize("fault", ["no config", "unreadable config", "damaged", "missing"])
async def test_records_that_cannot_be_read_leave_the_counts_and_stop_nothing(
    tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    config, records = make_run(3, 60)
    database = Database(tmp_path / DATABASE_FILE)
    await database.open()
    await bury(database, Dead(config, records, 60, 60), config=fault != "no config")
    at = ChunkRow.first_step == 30
    if fault == "damaged":
        await execute(database, update(ChunkRow).where(at).values(records=b"P\xc1"))
    elif fault == "unreadable config":
        await execute(database, update(SessionRow).values(config="{"))
    elif fault == "missing":
        await execute(database, delete(ChunkRow).where(at))
    await repair_after_crash(database, "this one")
    await database.close()
    query = "SELECT DISTINCT status, ended_step, ended_ns FROM requests"
    assert fetch(tmp_path / DATABASE_FILE, query) == [("interrupted", 60, records[-1].t_ns)]
    assert max(fetch(tmp_path / DATABASE_FILE, "SELECT num_output_tokens FROM requests")) == (1,)
    assert ("cannot be read" in caplog.text) == (fault != "no config")
