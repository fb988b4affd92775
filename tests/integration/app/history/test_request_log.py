"""Rows of requests, their events and the metrics, written by a running application over a fake engine."""

import asyncio
from typing import Any

import httpx
import msgspec
from sqlalchemy import select

from app.db.models import MetricRow, RequestEventRow, RequestRow, RequestTextRow
from app.history.metric_log import MetricLog
from tests.support.api import ServedApi, served_api, until
from tests.support.fake_engine import FakeEngine


async def read_all(api: ServedApi, model: Any) -> list[Any]:
    """Return all rows once everything has ended and is written."""
    hub = api.plugin.hub
    await until(lambda: hub.snapshot is not None and not hub.snapshot.sequences)
    await api.plugin.writer.settle()
    async with api.plugin.database.read() as session:
        return list(await session.scalars(select(model)))


async def chat(api: ServedApi, content: str, /, **fields: Any) -> httpx.Response:
    body = {"model": "fake", "messages": [{"role": "user", "content": content}], "max_tokens": 8, **fields}
    return await api.client.post("/v1/chat/completions", json=body)


async def complete(api: ServedApi, prompt: str, /, **fields: Any) -> httpx.Response:
    return await api.client.post(
        "/v1/completions", json={"model": "fake", "prompt": prompt, "max_tokens": 8, **fields}
    )


async def test_a_request_has_one_row_that_agrees_with_what_the_client_was_told() -> None:
    async with served_api(FakeEngine()) as api:
        answer = (await chat(api, "hello", n=2, temperature=0.5, seed=7)).json()
        (row,) = await read_all(api, RequestRow)
        events = await read_all(api, RequestEventRow)
        (text,) = await read_all(api, RequestTextRow)

    assert row.id == answer["id"]
    assert (row.status, row.kind, row.finish_reason, row.num_choices) == ("finished", "api", "length", 2)
    assert row.num_prompt_tokens == answer["usage"]["prompt_tokens"]
    assert row.num_output_tokens == answer["usage"]["completion_tokens"] == 16
    assert row.num_cached_tokens == answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert row.arrived_ns <= row.admitted_ns <= row.first_token_ns <= row.ended_ns
    assert 1 <= row.arrived_step <= row.admitted_step <= row.first_token_step <= row.ended_step
    assert msgspec.json.decode(row.params) == {"max_tokens": 8, "temperature": 0.5, "seed": 7}
    assert msgspec.json.decode(text.prompt) == {"messages": [{"role": "user", "content": "hello"}]}
    assert msgspec.json.decode(text.outputs) == [choice["message"]["content"] for choice in answer["choices"]]
    for choice in (0, 1):
        kinds = [event.kind for event in events if event.choice_index == choice]
        assert kinds == ["arrived", "admitted", "first_token", "finished"]


async def test_a_seed_that_was_drawn_survives_readers_that_have_only_floats() -> None:
    async with served_api(FakeEngine()) as api:
        for _ in range(8):
            await complete(api, "abc", max_tokens=1, temperature=1)
        seeds = [msgspec.json.decode(row.params)["seed"] for row in await read_all(api, RequestRow)]

    assert all(int(float(seed)) == seed < 2**53 for seed in seeds)
    assert len(set(seeds)) == len(seeds)


async def test_a_stop_string_counts_what_was_delivered_not_what_was_computed() -> None:
    async with served_api(FakeEngine()) as api:
        whole = (await complete(api, "abc", max_tokens=12, temperature=0)).json()["choices"][0]["text"]
        stopped = (await complete(api, "abc", max_tokens=12, temperature=0, stop=[whole[3:5]])).json()
        rows = {row.id: row for row in await read_all(api, RequestRow)}

    row = rows[stopped["id"]]
    assert row.num_output_tokens == stopped["usage"]["completion_tokens"]
    assert row.finish_reason == stopped["choices"][0]["finish_reason"] == "stop"
    assert row.status == "finished"


async def test_nothing_that_was_typed_or_answered_is_kept_while_text_recording_is_off() -> None:
    async with served_api(FakeEngine()) as api:
        api.plugin.recorder.switch_text(is_on=False)
        answer = await chat(api, "my secret", stop=["also secret"])
        (row,) = await read_all(api, RequestRow)
        assert await read_all(api, RequestTextRow) == []

    assert answer.status_code == 200
    assert row.status == "finished"
    assert "secret" not in row.params
    assert row.num_output_tokens == 8


async def test_a_refused_request_has_a_row_that_says_why_and_keeps_no_text() -> None:
    async with served_api(FakeEngine(max_waiting=1)) as api:
        refused = await complete(api, "abc", n=2)
        (row,) = await read_all(api, RequestRow)
        (event,) = await read_all(api, RequestEventRow)
        assert await read_all(api, RequestTextRow) == []

    assert refused.status_code == 400
    assert (row.status, row.error_code) == ("rejected", "invalid_value")
    assert row.ended_ns == row.arrived_ns
    assert (event.kind, event.request_id) == ("rejected", row.id)


async def test_a_failed_step_ends_its_requests_as_failed() -> None:
    async with served_api(FakeEngine()) as api:
        api.engine.runner.failures = 1
        failed = await chat(api, "hello")
        (row,) = await read_all(api, RequestRow)
        kinds = [event.kind for event in await read_all(api, RequestEventRow)]

    assert failed.status_code >= 500
    assert (row.status, row.error_code, row.finish_reason) == ("failed", "engine_error", "error")
    assert kinds[0] == "arrived"
    assert kinds[-2:] == ["finished", "reset"]


async def test_preemptions_are_counted_and_each_return_is_told_apart_from_the_first_admission() -> None:
    async with served_api(FakeEngine(num_blocks=12, max_model_len=48)) as api:
        answers = await asyncio.gather(
            *(complete(api, f"{index} prompt", max_tokens=30, temperature=0) for index in range(4))
        )
        rows = {row.id: row for row in await read_all(api, RequestRow)}
        events = await read_all(api, RequestEventRow)

    assert all(answer.status_code == 200 for answer in answers)
    assert sum(row.num_preemptions for row in rows.values()) > 0
    for answer in answers:
        row, usage = rows[answer.json()["id"]], answer.json()["usage"]
        assert row.num_output_tokens == usage["completion_tokens"] == 30
        kinds = [event.kind for event in events if event.request_id == row.id]
        assert kinds.count("preempted") == row.num_preemptions == kinds.count("resumed")
        assert kinds.count("admitted") == kinds.count("first_token") == 1
        if row.num_preemptions:
            assert row.num_recomputed_tokens > 0
            assert kinds.count("recomputed") <= row.num_preemptions


async def test_the_row_of_a_running_request_is_there_before_it_ends() -> None:
    async with served_api(FakeEngine()) as api:
        api.engine.runner.gate.clear()
        task = asyncio.create_task(chat(api, "hello", max_tokens=3))
        await asyncio.sleep(0)
        api.engine.runner.step_s = 0.2
        api.engine.runner.gate.set()
        await until(lambda: api.plugin.hub.snapshot is not None and api.plugin.hub.snapshot.step >= 1)
        await api.plugin.writer.settle()
        async with api.plugin.database.read() as session:
            (row,) = list(await session.scalars(select(RequestRow)))
        await task

    assert row.status == "running"
    assert row.ended_ns is None


async def test_metrics_add_up_to_the_totals_of_the_session() -> None:
    async with served_api(FakeEngine()) as api:
        for index in range(3):
            await complete(api, f"{index} some prompt", max_tokens=5)
        (log,) = [part for part in api.plugin.recorder._parts if isinstance(part, MetricLog)]
        await until(lambda: log._sums is None)
        rows = await read_all(api, MetricRow)
        totals = api.plugin.hub.snapshot.totals  # type: ignore[union-attr]
        step = api.plugin.hub.snapshot.step  # type: ignore[union-attr]

    assert sum(row.num_prefill_tokens for row in rows) == totals.num_prefill_tokens
    assert sum(row.num_finished for row in rows) == sum(row.num_arrived for row in rows) == 3
    assert sum(row.num_ttft for row in rows) == 3
    assert sum(row.num_hit_tokens for row in rows) == totals.num_hit_tokens
    assert sum(row.num_lookup_tokens for row in rows) == totals.num_lookup_tokens
    assert sum(row.num_steps for row in rows) == step == max(row.last_step for row in rows)
    assert all(row.max_ttft_ns * row.num_ttft >= row.ttft_ns for row in rows)
