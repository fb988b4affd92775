"""A server killed in the middle of its work, twenty times: what it had said is in the history, once."""

import asyncio
import random
import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.db.database import DATABASE_FILE, check_integrity
from tests.support.tiny_server import make_load, tiny_server, write_tiny_model

KILLS_A_LANE = 10
NUM_LANES = 2
"""Folders with servers of their own, so that one can start while another works."""

NUM_CLIENTS = 6
PROMISE_S = 1.0
"""What was answered so long before the end must be there."""


@dataclass
class Life:
    """One server run as its clients saw it."""

    session_id: str = ""
    answered: dict[str, float] = field(default_factory=dict)
    killed_at: float = 0.0


def query(folder: Path, sql: str, *values: Any) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(folder / DATABASE_FILE)) as connection:
        return connection.execute(sql, values).fetchall()


async def live_once(model: Path, folder: Path, rng: random.Random, before: Life | None) -> Life:
    """Start a server, check what it says of the life before, load it and kill it at a random moment."""
    life = Life()
    server = tiny_server(model, folder, wait_ready=False)
    await asyncio.to_thread(server.__enter__)
    try:
        await asyncio.to_thread(server.wait_until_ready)
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            life.session_id = (await client.get("/api/engine/state?blocks=0")).json()["session"]
            await wait_until_recorded(client, life.session_id)
            if before is not None:
                await check_listing(client, before)
            load = asyncio.create_task(
                make_load(
                    client,
                    NUM_CLIENTS,
                    lambda request_id: life.answered.__setitem__(request_id, time.monotonic()),
                    rng.randrange(1000),
                )
            )
            await asyncio.sleep(rng.uniform(0.05, 1.0 + PROMISE_S))
            server.process.kill()
            life.killed_at = time.monotonic()
            await asyncio.to_thread(server.process.wait)
            await load
    finally:
        await asyncio.to_thread(server.__exit__, None, None, None)
    return life


async def list_sessions(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    """Return the sessions, of which there are none while the server still opens its history."""
    response = await client.get("/api/sessions")
    return list(response.json()["items"]) if response.status_code == httpx.codes.OK else []


async def wait_until_recorded(client: httpx.AsyncClient, session_id: str) -> None:
    """Wait until a session is in the history: the model may be ready before that."""
    async with asyncio.timeout(20):
        while session_id not in {session["id"] for session in await list_sessions(client)}:
            await asyncio.sleep(0.01)


async def check_listing(client: httpx.AsyncClient, before: Life) -> None:
    """The next server lists the killed one as interrupted and can show its last state."""
    found = [session for session in await list_sessions(client) if session["id"] == before.session_id]
    assert [session["status"] for session in found] == ["interrupted"]
    assert found[0]["ended"] is not None
    assert found[0]["num_lost_steps"] == 0
    if found[0]["last_step"] == 0:
        return  # killed before anything was written of its steps
    state = await client.get(f"/api/sessions/{before.session_id}/state")
    assert (state.status_code, state.json()["step"]) == (200, found[0]["last_step"])


def check_file(folder: Path, life: Life) -> None:
    """After the next start: the promised requests are there, nothing is open, nothing is there twice."""
    rows = query(folder, "SELECT id, status FROM requests WHERE session_id = ?", life.session_id)
    status = dict(rows)
    promised = [name for name, at in life.answered.items() if at < life.killed_at - PROMISE_S]
    assert {status.get(name) for name in promised} <= {"finished"}
    assert set(status.values()) <= {"finished", "interrupted"}
    endless = query(
        folder, "SELECT id FROM requests WHERE session_id = ? AND ended_ns IS NULL", life.session_id
    )
    assert endless == []
    chunks = query(
        folder,
        "SELECT first_step, num_steps FROM chunks WHERE session_id = ? ORDER BY first_step",
        life.session_id,
    )
    following = 1
    for first_step, num_steps in chunks:
        assert first_step == following
        following += num_steps
    ((last_step,),) = query(folder, "SELECT last_step FROM sessions WHERE id = ?", life.session_id)
    assert following == last_step + 1
    doubled = query(
        folder,
        "SELECT request_id, choice_index, kind, count(*) FROM request_events WHERE session_id = ? "
        "AND kind IN ('arrived', 'first_token', 'finished') GROUP BY 1, 2, 3 HAVING count(*) > 1",
        life.session_id,
    )
    assert doubled == []


async def run_lane(model: Path, folder: Path, seed: int) -> tuple[int, int]:
    """Kill so many servers one after the other; return how many answers there were and were promised."""
    rng = random.Random(seed)
    lives: list[Life] = []
    for _ in range(KILLS_A_LANE):
        lives.append(await live_once(model, folder, rng, lives[-1] if lives else None))
        assert await asyncio.to_thread(check_integrity, folder / DATABASE_FILE) == "ok"
        for life in lives[:-1]:
            check_file(folder, life)
    with tiny_server(model, folder) as server:  # ends in order
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            session_id = (await client.get("/api/engine/state?blocks=0")).json()["session"]
            await wait_until_recorded(client, session_id)
            await check_listing(client, lives[-1])
    for life in lives:
        check_file(folder, life)
    statuses = query(folder, "SELECT ended_how, count(*) FROM sessions GROUP BY 1 ORDER BY 1")
    assert statuses == [("interrupted", KILLS_A_LANE), ("stopped", 1)]
    answered = [at - life.killed_at for life in lives for at in life.answered.values()]
    return len(answered), sum(before < -PROMISE_S for before in answered)


@pytest.mark.slow
async def test_twenty_kills_lose_nothing_that_was_said_a_second_before(tmp_path: Path) -> None:
    model = await asyncio.to_thread(write_tiny_model, tmp_path / "model")
    counts = await asyncio.gather(
        *(run_lane(model, tmp_path / f"lane{lane}", seed=lane) for lane in range(NUM_LANES))
    )
    assert sum(answered for answered, _ in counts) > 20
    assert sum(promised for _, promised in counts) > 5
