"""Policies that change under load on a real server: the record, the state and the replay agree."""

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx

from tests.support.tiny_server import served_model, tiny_server, write_tiny_model

NUM_CLIENTS = 8
CLASSES = ("premium", "standard", "bulk")
CHANGES = (
    {"policy": "priority", "preemption": "smallest-residual"},
    {"preemption": "oldest-first", "preemption_mode": "swap"},
    {"policy": "fcfs", "preemption": "least-computed-first", "preemption_mode": "recompute"},
    {"preemption": "lowest-temperature", "preemption_mode": "auto"},
)
REQUESTS_PER_CHANGE = 12


async def go_on(client: httpx.AsyncClient, model: str, number: int, done: list[str]) -> None:
    """Ask one request after the other, of every class, until cancelled."""
    rng = random.Random(number)
    while True:
        body = {
            "model": model,
            "prompt": [*range(10, 42), *(rng.randrange(10, 250) for _ in range(rng.randrange(1, 20)))],
            "max_tokens": rng.randrange(16, 80),
            "ignore_eos": True,
            "priority": rng.choice(CLASSES),
        }
        response = await client.post("/v1/completions", json=body)
        response.raise_for_status()
        done.append(response.json()["id"])


async def switch_under_load(client: httpx.AsyncClient, model: str) -> list[dict[str, Any]]:
    """Change the policies again and again while clients ask; return the answers."""
    done: list[str] = []
    load = asyncio.gather(*(go_on(client, model, number, done) for number in range(NUM_CLIENTS)))
    answers = []
    for change in CHANGES:
        answer = await client.post("/api/engine/policy", json=change)
        answer.raise_for_status()
        answers.append(answer.json())
        num_done = len(done)
        while len(done) < num_done + REQUESTS_PER_CHANGE:
            await asyncio.sleep(0.01)
            if load.done():
                await load  # raises what ended it
    load.cancel()
    await asyncio.gather(load, return_exceptions=True)
    return answers


async def get(client: httpx.AsyncClient, path: str) -> Any:
    response = await client.get(path)
    response.raise_for_status()
    return response.json()


async def test_policies_change_under_load_and_the_replay_has_each_change_where_it_was(tmp_path: Path) -> None:
    model_dir = write_tiny_model(tmp_path / "tiny")
    names = ("policy", "preemption", "preemption_mode")
    arguments = ("--swap-memory", "256KiB", "--preemption-quantum", "4", "--preemption", "newest-first")
    with tiny_server(model_dir, tmp_path / "data", *arguments) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            answers = await switch_under_load(client, await served_model(client))
            state = await get(client, "/api/engine/state?blocks=0")
            while state["running"] or state["waiting"]:
                await asyncio.sleep(0.02)
                state = await get(client, "/api/engine/state?blocks=0")
            sid, last = state["session"], state["step"]
            while (await client.get(f"/api/sessions/{sid}")).json().get("last_step", 0) < last:
                await asyncio.sleep(0.05)

            expected = dict(zip(names, ("fcfs", "newest-first", "auto"), strict=True))
            for change, answer in zip(CHANGES, answers, strict=True):
                before = await get(client, f"/api/sessions/{sid}/state?step={answer['step'] - 1}&blocks=0")
                assert before["policies"] == expected
                expected |= change
                after = await get(client, f"/api/sessions/{sid}/state?step={answer['step']}&blocks=0")
                assert after["policies"] == expected == {name: answer[name] for name in names}
            assert state["policies"] == expected

            records = []
            for first in range(1, last + 1, 256):
                records += (await get(client, f"/api/sessions/{sid}/chunks/{first}?format=records"))["items"]
            told = [(r["step"], e) for r in records for e in r["events"] if e["type"] == "policies"]
            assert [step for step, _ in told] == [answer["step"] for answer in answers]
            check_preemptions(records, expected_at=answers)
            assert state["totals"]["num_stalls"] == 0
            assert state["counts"]["used"] == 0
            items = (await get(client, "/api/requests?limit=500"))["items"]
            assert {item["priority"] for item in items} == {-10, 0, 10}


def check_preemptions(records: list[dict[str, Any]], *, expected_at: list[dict[str, Any]]) -> None:
    """Each preemption follows the policies that were in force; all policies had some to decide."""
    used = set()
    priorities: dict[int, int] = {}
    for record in records:
        changes = [answer for answer in expected_at if answer["step"] <= record["step"]]
        in_force = changes[-1] if changes else {"policy": "fcfs", "preemption": "newest-first"}
        events = record["events"]
        priorities |= {event["seq_id"]: event["priority"] for event in events if event["type"] == "arrived"}
        for event in events:
            if event["type"] == "preempted":
                assert event["policy"] == in_force["preemption"]
                by_urgency = in_force["policy"] == "priority"
                places = {
                    seq_id: (-priorities[seq_id] if by_urgency else 0, score, -seq_id)
                    for seq_id, score in event["candidates"]
                }
                assert places[event["seq_id"]] == min(places.values())
                used.add(event["policy"])
    assert len(used) >= 2, "too few preemptions for the test to say anything"
