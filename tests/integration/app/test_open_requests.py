"""Requests that run, wait again or are cut off: every place tells the same of them, and it is true."""

import asyncio
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from app.db.database import DATABASE_FILE
from app.history.request_log import RequestLog
from tests.support.api import ServedApi, served_api, until
from tests.support.fake_engine import FakeEngine
from tests.support.history import fetch

HTML = {"accept": "text/html"}


def small_engine() -> FakeEngine:
    """Return an engine in which four long answers do not fit at once."""
    return FakeEngine(num_blocks=14, max_model_len=56)


@pytest.fixture
async def api() -> AsyncIterator[ServedApi]:
    async with served_api(small_engine()) as served:
        await until(lambda: served.plugin.database.is_open)
        yield served


def start(api: ServedApi, prompt: str, **fields: Any) -> "asyncio.Task[Any]":
    body = {"model": "fake", "prompt": prompt, "temperature": 0, **fields}
    return asyncio.create_task(api.client.post("/v1/completions", json=body))


async def pause(api: ServedApi, num_tokens: int) -> None:
    """Hold the engine up once it has computed so many tokens, and wait until that is on record."""
    hub = api.plugin.hub
    api.engine.runner.step_s = 0.005
    await until(lambda: hub.snapshot is not None and hub.snapshot.totals.num_output_tokens >= num_tokens)
    await hold(api)


async def hold(api: ServedApi) -> None:
    api.engine.runner.gate.clear()
    num_steps = api.engine.runner.num_steps
    while True:
        await asyncio.sleep(0.05)
        if api.engine.runner.num_steps == num_steps:
            break
        num_steps = api.engine.runner.num_steps
    await api.plugin.writer.settle()
    # The newest steps are written a moment after they were made.
    step = api.plugin.hub.snapshot.step if api.plugin.hub.snapshot else 0
    async with asyncio.timeout(10):
        while (await get(api, f"/api/sessions/{api.plugin.hub.session_id}"))["last_step"] < step:
            await asyncio.sleep(0.01)


async def get(api: ServedApi, path: str) -> dict[str, Any]:
    response = await api.client.get(path)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def test_a_running_request_has_as_many_tokens_everywhere_as_the_engine_has_computed(
    api: ServedApi,
) -> None:
    task = start(api, "wait", max_tokens=40, n=2)
    await pause(api, 24)
    snapshot = api.plugin.hub.snapshot
    assert snapshot is not None
    num_tokens = snapshot.totals.num_output_tokens

    (item,) = (await get(api, "/api/requests"))["items"]
    life = await get(api, f"/api/requests/{item['id']}")
    page = (await api.client.get(f"/r/{item['id']}", headers=HTML)).text
    listed = (await api.client.get("/requests", headers=HTML)).text
    assert item["num_output_tokens"] == life["num_output_tokens"] == num_tokens
    assert sum(len(choice["tokens"]) for choice in life["choices"]) == num_tokens
    assert f"<dd>{num_tokens} of at most 80 tokens" in page
    assert f'<td class="num">{num_tokens}</td>' in listed
    least = item["num_prompt_tokens"] + num_tokens
    assert len((await get(api, f"/api/requests?min_tokens={least}"))["items"]) == 1
    assert (await get(api, f"/api/requests?min_tokens={least + 1}"))["items"] == []
    api.engine.runner.gate.set()
    await task


async def test_a_preempted_request_waits_and_says_why_it_was_chosen_and_what_it_waited_for(
    api: ServedApi,
) -> None:
    tasks = [start(api, f"{number} prompt of mine", max_tokens=24) for number in range(4)]
    api.engine.runner.step_s = 0.01
    hub = api.plugin.hub
    await until(
        lambda: (
            hub.snapshot is not None and any(view.num_preemptions for view in hub.snapshot.sequences.values())
        )
    )
    await hold(api)
    assert hub.snapshot is not None
    by_slot = {view.request_id: view.slot >= 0 for view in hub.snapshot.sequences.values()}
    items = {item["id"]: item for item in (await get(api, "/api/requests"))["items"]}
    for request_id, has_slot in by_slot.items():
        assert items[request_id]["status"] == ("running" if has_slot else "waiting")
    waiting = (await get(api, "/api/requests?status=waiting"))["items"]
    assert {item["id"] for item in waiting} == {name for name, has_slot in by_slot.items() if not has_slot}
    api.engine.runner.step_s = 0
    api.engine.runner.gate.set()
    await asyncio.gather(*tasks)
    await until(lambda: hub.snapshot is not None and not hub.snapshot.sequences)
    await hold(api)

    preempted = (await get(api, "/api/requests?min_preemptions=1"))["items"]
    assert preempted
    assert all(item["num_preemptions"] for item in preempted)
    life = await get(api, f"/api/requests/{preempted[0]['id']}")
    (choice,) = life["choices"]
    assert [found["step"] for found in choice["victims"]] == [event["step"] for event in life["preemptions"]]
    candidates = choice["victims"][0]["candidates"]
    lowest = min(candidates, key=lambda candidate: candidate["score"])
    assert lowest["request_id"] == life["id"]
    assert {candidate["request_id"] for candidate in candidates} <= set(items)
    assert "no_free_blocks" in {wait["reason"] for wait in choice["waits"]}
    page = (await api.client.get(f"/r/{life['id']}", headers=HTML)).text
    assert "too few blocks are free" in page
    assert f"this request {lowest['score']:.6g}" in page


async def test_the_speed_of_prefill_is_told_for_each_of_several_answers(api: ServedApi) -> None:
    answer = (await start(api, "hello there", max_tokens=5, n=2)).json()
    await hold(api)
    for choice in (0, 1):
        page = (await api.client.get(f"/r/{answer['id']}?choice={choice}", headers=HTML)).text
        (told,) = re.findall(r"<dt>Prefill</dt><dd>(.*?)</dd>", page)
        assert told.endswith(" tok/s")
        assert re.search(r"\d\d:\d\d:\d\d\.\d{3} UTC", page), "moments of phases have milliseconds"


async def test_what_the_stop_of_the_server_cuts_off_is_interrupted_and_what_a_client_leaves_is_not(
    tmp_path: Path,
) -> None:
    async with served_api(small_engine(), data_dir=tmp_path, shutdown_timeout=0.0) as api:
        await until(lambda: api.plugin.database.is_open)
        left = start(api, "I leave", max_tokens=40)
        cut = start(api, "I stay", max_tokens=40)
        await pause(api, 8)
        left.cancel()
        hub = api.plugin.hub
        api.engine.runner.gate.set()
        await until(lambda: hub.snapshot is not None and hub.snapshot.totals.num_aborted > 0)
        api.server.should_exit = True
        assert (await cut).status_code == 503
    rows = fetch(
        tmp_path / DATABASE_FILE,
        "SELECT prompt, status, ended_step, num_output_tokens "
        "FROM requests JOIN request_texts ON request_id = id",
    )
    found = {("leave" in row[0]): row[1:] for row in rows}
    assert found[True][0] == "aborted"
    assert found[False][0] == "interrupted"
    assert found[False][1] > 0
    assert found[False][2] > 0


async def test_after_a_crash_a_cut_request_has_the_tokens_and_the_end_of_its_last_record(
    tmp_path: Path,
) -> None:
    async with served_api(small_engine(), data_dir=tmp_path / "died") as api:
        await until(lambda: api.plugin.database.is_open)
        tasks = [start(api, f"{number} prompt", max_tokens=36, n=number % 2 + 1) for number in range(3)]
        await pause(api, 60)
        hub = api.plugin.hub
        assert hub.snapshot is not None
        computed = hub.snapshot.totals.num_output_tokens
        await asyncio.to_thread(shutil.copytree, tmp_path / "died", tmp_path / "found")
        api.engine.runner.gate.set()
        await asyncio.gather(*tasks)
        session = hub.session_id
    async with served_api(small_engine(), data_dir=tmp_path / "found") as api:
        await until(lambda: api.plugin.database.is_open)
        await api.plugin.writer.settle()  # what is queued comes after the repair
        info = await get(api, f"/api/sessions/{session}")
        items = (await get(api, f"/api/requests?session={session}"))["items"]
        lives = [await get(api, f"/api/requests/{item['id']}") for item in items]
        page = (await api.client.get(f"/r/{items[0]['id']}", headers=HTML)).text
        listed = (await api.client.get(f"/requests?session={session}", headers=HTML)).text

    assert sum(item["num_output_tokens"] for item in items) == computed
    assert "interrupted" in {item["status"] for item in items}
    for item, life in zip(items, lives, strict=True):
        assert sum(len(choice["tokens"]) for choice in life["choices"]) == item["num_output_tokens"]
        assert all(phase["end"] for choice in life["choices"] for phase in choice["phases"])
        if item["status"] == "interrupted":
            assert item["ended_step"] == info["last_step"]
            assert item["ended"] >= max(
                token["time"] for choice in life["choices"] for token in choice["tokens"][-1:]
            )
    assert "hx-get" not in page.partition("<main")[2]
    assert f'data-charts="/api/sessions/{session}/metrics"' in listed, "the charts of what is listed"
    assert "Per second, session of" in listed
    assert f'href="/s/{session}/charts"' in listed
    assert '<th scope="col">Session</th>' not in listed


async def test_a_list_of_several_sessions_says_which_is_which(tmp_path: Path) -> None:
    sessions = []
    for _ in range(2):
        async with served_api(small_engine(), data_dir=tmp_path) as api:
            await until(lambda api=api: api.plugin.database.is_open)  # type: ignore[misc]
            await start(api, "hello", max_tokens=2)
            await hold(api)
            sessions.append(api.plugin.hub.session_id)
            listed = (await api.client.get("/requests", headers=HTML)).text
    assert '<th scope="col">Session</th>' in listed
    for session in sessions:
        assert f'href="/requests?session={session}"' in listed


async def test_rows_stay_as_they_are_when_recording_lags_behind_the_engine(api: ServedApi) -> None:
    task = start(api, "wait", max_tokens=40)
    await pause(api, 5)
    (log,) = [part for part in api.plugin.recorder._parts if isinstance(part, RequestLog)]
    (request_id,) = log.open_ids(0)
    assert log.current(request_id) is not None
    log._last_step -= 1
    assert log.current(request_id) is None
    assert log.open_ids(0) == []
    log._last_step += 1
    api.engine.runner.gate.set()
    await task
