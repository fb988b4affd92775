import asyncio
import json
from typing import Any

import pytest

from app.realtime import state_json
from app.realtime.hub import EventHub
from app.realtime.state_json import encode_state
from tests.builders import make_core, make_request, random_run


def make_hub(num_steps: int = 40) -> EventHub:
    hub = EventHub("s1")
    for core, result in random_run(3, num_steps):
        if hub.snapshot is None:
            hub.open(core.config, "fake")
        hub.publish([result.record])
    return hub


def plain(data: dict[str, Any]) -> Any:
    return json.loads(json.dumps(data))


@pytest.mark.parametrize("slice_blocks", [1, 5, 24, 1000])
async def test_the_document_is_the_snapshot(slice_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_json, "SLICE_BLOCKS", slice_blocks)
    hub = make_hub()
    assert hub.snapshot is not None
    document = json.loads(await encode_state(hub, {"status": "ready"}))
    assert document == {"status": "ready", **plain(hub.snapshot.to_dict())}


async def test_blocks_can_be_left_out() -> None:
    hub = make_hub()
    assert hub.snapshot is not None
    document = json.loads(await encode_state(hub, {}, with_blocks=False))
    assert document == plain(hub.snapshot.to_dict(with_blocks=False))
    assert "blocks" not in document


async def test_while_the_model_loads_the_state_is_empty() -> None:
    document = json.loads(await encode_state(EventHub("s1"), {"status": "loading"}))
    assert document["status"] == "loading"
    assert (document["blocks"], document["running"], document["config"]) == ([], [], None)
    ready = json.loads(await encode_state(make_hub(), {"status": "ready"}))
    assert document.keys() == ready.keys()
    assert document["counts"].keys() == ready["counts"].keys()


@pytest.mark.parametrize("max_rounds", [1, 64])
async def test_a_document_made_while_the_engine_runs_is_of_one_step(
    monkeypatch: pytest.MonkeyPatch, max_rounds: int
) -> None:
    monkeypatch.setattr(state_json, "SLICE_BLOCKS", 3)
    monkeypatch.setattr(state_json, "MAX_ROUNDS", max_rounds)
    core = make_core(num_blocks=64, max_model_len=64)
    hub = EventHub("s1")
    hub.open(core.config, "fake")
    states: dict[int, Any] = {}

    async def run() -> None:
        for number in range(2000):
            if not core.has_work:
                core.add_request(make_request(f"r{number}", prompt=5 + number % 20, max_tokens=20))
            hub.publish([core.step().record])
            assert hub.snapshot is not None
            states[hub.snapshot.step] = plain(hub.snapshot.to_dict())
            await asyncio.sleep(0)

    running = asyncio.create_task(run())
    documents = []
    while not running.done():
        documents += [
            json.loads(body) for body in await asyncio.gather(*(encode_state(hub, {}) for _ in range(3)))
        ]
        await asyncio.sleep(0)
    await running
    assert len({document["step"] for document in documents}) > 5
    for document in documents:
        assert document == states[document["step"]]
