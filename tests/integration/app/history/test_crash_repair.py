"""What a process that died left open is ended at the next start; what is whole stays as it is."""

import logging
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert

from app.db.database import DATABASE_FILE, Database
from app.db.models import Base, ChunkRow, ConversationRow, MessageRow, RequestRow, SessionRow
from app.history.crash_repair import repair_after_crash
from tests.support.history import fetch, session_values

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
    async with database.write() as connection:
        for table, values in rows:
            await connection.execute(insert(table).values(**values))


def make_rows() -> list[tuple[type[Base], dict[str, Any]]]:
    """Return what is in the file of a server that died, and of the one that has just begun."""
    chunk = {"session_id": "died", "first_ns": 0, **CHUNK}
    return [
        (SessionRow, session_values("died", 10)),
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
    assert dict(fetch(path, "SELECT id, status FROM messages")) == {
        "half": "interrupted",
        "whole": "complete",
    }
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "The last run did not end in order: 2 sessions, 2 requests and 1 messages are interrupted"
    ]
