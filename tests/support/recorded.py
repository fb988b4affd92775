"""Sessions of a fake engine that are in the history, to be looked at."""

import asyncio
import random
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.support.api import ServedApi, served_api, until
from tests.support.fake_engine import FakeEngine

STEP_S = 0.003


def make_small_engine(**config: Any) -> FakeEngine:
    """Return an engine in which prefixes are shared, sequences preempted and blocks evicted."""
    settings = {
        "num_blocks": 40,
        "block_size": 16,
        "max_num_batched_tokens": 64,
        "max_model_len": 512,
        "max_num_seqs": 7,
        **config,
    }
    engine = FakeEngine(**settings)
    engine.runner.step_s = STEP_S
    return engine


async def send_chats(api: ServedApi, *, num: int = 40, seed: int = 3) -> None:
    """Send chats with common beginnings, several at once, and wait for all answers."""
    rng = random.Random(seed)
    gate = asyncio.Semaphore(12)

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        async with gate:
            body = api.chat_body(
                "lighthouse " * (3 + number % 5) + str(number % 4),
                max_tokens=rng.randrange(20, 140),
                ignore_eos=True,
            )
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text

    async with httpx.AsyncClient(base_url=api.url, timeout=60) as client:
        await asyncio.gather(*(ask(client, number) for number in range(num)))


async def record_session(data_dir: Path, *, num: int = 40) -> str:
    """Let a server run, answer chats and stop; return the id of its session."""
    async with served_api(make_small_engine(), data_dir=data_dir) as api:
        await send_chats(api, num=num)
        assert api.plugin.hub.snapshot is not None
        totals = api.plugin.hub.snapshot.totals
        assert totals.num_preemptions > 0
        assert totals.num_evictions > 0
        assert totals.num_hit_tokens > 0
        return api.plugin.hub.session_id


@asynccontextmanager
async def served_copy(recording: Path, data_dir: Path) -> AsyncIterator[ServedApi]:
    """Serve what was recorded in one folder from a copy of it: a test may change that."""
    shutil.copytree(recording, data_dir)
    async with served_api(make_small_engine(), data_dir=data_dir) as api:
        await until(lambda: api.plugin.database.is_open)
        await api.plugin.writer.settle()
        yield api


async def read_preemptions(client: httpx.AsyncClient, session: str) -> dict[int, list[dict[str, Any]]]:
    """Return the preemptions of a session by step, from the records."""
    found: dict[int, list[dict[str, Any]]] = {}
    facts = (await client.get(f"/api/sessions/{session}")).json()
    for first in range(1, facts["last_step"] + 1, facts["chunk_steps"]):
        chunk = (await client.get(f"/api/sessions/{session}/chunks/{first}?format=records")).json()
        for record in chunk["items"]:
            events = [event for event in record["events"] if event["type"] == "preempted"]
            if events:
                found[record["step"]] = events
    return found
