"""A real server, stopped and started again: it says of any step what it said when that was the newest one."""

import asyncio
import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx

from app.db.database import DATABASE_FILE
from tests.support.tiny_server import make_load, tiny_server, write_tiny_model
from tests.support.wire import Picture, packed_cells, split_messages

NUM_STEPS = 50


async def watch_states(client: httpx.AsyncClient, states: dict[int, Any]) -> None:
    """Ask for the state at random moments."""
    rng = random.Random(1)
    while True:
        state = (await client.get("/api/engine/state")).json()
        states[state["step"]] = state
        await asyncio.sleep(rng.uniform(0, 0.02))


async def record_session(client: httpx.AsyncClient) -> dict[int, Any]:
    """Load the server until enough has happened; return the states that were seen."""
    states: dict[int, Any] = {}
    watcher = asyncio.create_task(watch_states(client, states))
    load = asyncio.create_task(make_load(client, 8, lambda _: None, seed=1))
    async with asyncio.timeout(60):
        while True:
            await asyncio.sleep(0.05)
            totals = states[max(states)]["totals"] if states else {}
            has_happened = [totals.get(f"num_{name}") for name in ("preemptions", "hit_tokens", "evictions")]
            if len(states) > NUM_STEPS and max(states) > 600 and all(has_happened):
                break
    for task in (watcher, load):
        task.cancel()
    await asyncio.gather(watcher, load, return_exceptions=True)
    return states


async def compare(client: httpx.AsyncClient, session_id: str, steps: list[int], states: Any) -> None:
    for step in steps:
        answer = await client.get(f"/api/sessions/{session_id}/state?step={step}")
        assert answer.json() == states[step], f"step {step}"


async def test_states_survive_a_restart_and_the_loss_of_all_cached_ones(tmp_path: Path) -> None:
    model = await asyncio.to_thread(write_tiny_model, tmp_path / "model")
    data_dir = tmp_path / "data"
    with tiny_server(model, data_dir) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            states = await record_session(client)
    steps = random.Random(2).sample(sorted(states), NUM_STEPS)
    session_id = states[steps[0]]["session"]
    with tiny_server(model, data_dir, wait_ready=False) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            async with asyncio.timeout(20):
                while (await client.get("/api/sessions")).status_code != 200:
                    await asyncio.sleep(0.05)
            session = (await client.get(f"/api/sessions/{session_id}")).json()
            assert (session["status"], session["gaps"]) == ("stopped", [])
            await compare(client, session_id, steps, states)
            with closing(sqlite3.connect(data_dir / DATABASE_FILE)) as connection:
                with connection:
                    deleted = connection.execute("DELETE FROM keyframes").rowcount
                assert deleted >= 2
            await compare(client, session_id, steps[:10], states)
            frames = (await client.get(f"/api/sessions/{session_id}/chunks/257")).content
            picture = Picture()
            for message in split_messages(frames):
                picture.apply(message)
                if picture.step in states:
                    assert picture.cells == packed_cells(states[picture.step]["blocks"])
            assert picture.step == 512
