"""Priorities of requests over a fake engine: order, rows, and what is refused."""

import asyncio
from functools import partial
from typing import Any

import httpx
import pytest

from app.setting_values import PriorityClass
from tests.support.api import MODEL, POLL_TIMEOUT_S, ServedApi, running_api, served_api, until
from tests.support.fake_engine import FakeEngine
from tests.support.history import fetch

HTML = {"accept": "text/html"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": MODEL, "prompt": "hi", "max_tokens": 2},
    "/v1/chat/completions": {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 2,
    },
}


def has_commands(api: ServedApi, count: int) -> bool:
    return api.plugin.host._thread.num_commands == count


async def run_one_by_one(api: ServedApi, priorities: dict[str, Any], first: int = 0) -> list[str]:
    """Have requests wait behind one that runs; return their names in the order of their first tokens."""
    state = api.engine.core.scheduler.state

    def ask(name: str, **fields: Any) -> asyncio.Task[httpx.Response]:
        body = {"model": MODEL, "prompt": f"{name} please", "max_tokens": 2, **fields}
        return asyncio.create_task(api.client.post("/v1/completions", json=body))

    api.engine.runner.gate.clear()
    tasks = {"first": ask("first", priority=first)}
    await until(lambda: api.engine.core.has_work)
    for number, (name, priority) in enumerate(priorities.items(), start=1):
        tasks[name] = ask(name, priority=priority)
        # Taken by the engine before the next one is sent; it is in a step that the gate holds up.
        await until(partial(has_commands, api, number))
    api.engine.runner.gate.set()
    names = {(await task).json()["id"]: name for name, task in tasks.items()}
    assert len(state.running) == 0
    await recorded(api)
    rows = fetch(api.plugin.database.path, "SELECT id FROM requests ORDER BY first_token_step")
    return [names[request_id] for (request_id,) in rows]


async def recorded(api: ServedApi) -> None:
    """Wait until all that has happened is in the history."""
    snapshot = api.plugin.hub.snapshot
    assert snapshot is not None
    await until(lambda: api.plugin.database.is_open and not snapshot.sequences)
    path = f"/api/sessions/{api.plugin.hub.session_id}"
    async with asyncio.timeout(POLL_TIMEOUT_S):
        while (await api.client.get(path)).json().get("last_step", 0) < snapshot.step:
            await asyncio.sleep(0.01)
    await api.plugin.writer.settle()


ASKED = {"late": "bulk", "usual": None, "soon": "premium", "sooner": -500, "last": 500}


async def test_the_urgent_get_their_first_tokens_first_under_the_policy_priority() -> None:
    engine = FakeEngine(max_num_seqs=1, policy="priority")
    async with served_api(engine) as api:
        order = await run_one_by_one(api, ASKED)
        assert order == ["first", "sooner", "soon", "usual", "late", "last"]


async def test_first_come_first_served_takes_note_of_priorities_and_goes_by_arrival() -> None:
    async with served_api(FakeEngine(max_num_seqs=1)) as api:
        assert await run_one_by_one(api, ASKED) == ["first", *ASKED]
        items = (await api.client.get("/api/requests")).json()["items"]
        assert [item["priority"] for item in items] == [500, -500, -10, 0, 10, 0]
        assert (await api.client.get(f"/api/requests/{items[0]['id']}")).json()["priority"] == 500
        page = (await api.client.get("/requests", headers=HTML)).text
        assert '<td class="num">-500</td>' in page
        assert "<dt>Priority</dt><dd>500</dd>" in (await api.client.get(f"/r/{items[0]['id']}")).text


async def test_why_a_request_waited_names_priority() -> None:
    async with served_api(FakeEngine(max_num_seqs=1, policy="priority")) as api:
        await run_one_by_one(api, {"late": 10, "soon": 0}, first=-10)
        items = (await api.client.get("/api/requests")).json()["items"]
        waits = {}
        for item in items:
            life = (await api.client.get(f"/api/requests/{item['id']}")).json()
            waits[item["priority"]] = {wait["reason"] for wait in life["choices"][0]["waits"]}
        assert waits == {-10: set(), 10: {"priority", "max_num_seqs"}, 0: {"max_num_seqs"}}


@pytest.mark.parametrize("path", BODIES)
async def test_a_priority_that_cannot_be_is_refused_with_the_known_names(path: str) -> None:
    classes = (PriorityClass("slow", 9), PriorityClass("quick", -9))
    priority: Any
    async with running_api(priority_class=classes) as api:
        for priority in ("premium", "", "5", 1001, -1001, 2**70):
            answer = await api.client.post(path, json={**BODIES[path], "priority": priority})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (400, "priority", "invalid_value")
            assert "-1000 to 1000" in error["message"]
            assert "the names quick, slow." in error["message"]
        for priority in (1.5, True, [], {}):
            answer = await api.client.post(path, json={**BODIES[path], "priority": priority})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (400, "priority", "invalid_type")
        for priority in ("quick", None, 0, -1000, 1000):
            answer = await api.client.post(path, json={**BODIES[path], "priority": priority})
            assert answer.status_code == 200, answer.text
        assert not any(name == "priority" for name in api.plugin._services.ignored_fields.counts)


async def test_a_refused_request_keeps_the_priority_that_it_asked_for() -> None:
    async with running_api() as api:
        answer = await api.complete("x" * 127, priority="bulk", max_tokens=1)
        assert answer.status_code == 200
        assert (await api.complete("x" * 128, priority="bulk")).status_code == 400
        await api.plugin.writer.settle()
        rows = fetch(api.plugin.database.path, "SELECT status, priority FROM requests ORDER BY arrived_ns")
        assert rows == [("finished", 10), ("rejected", 10)]


async def test_a_load_with_classes_reports_each() -> None:
    async with running_api() as api:
        form = {"source": "generated", "rows": "10", "rate": "0", "prompt_tokens": "20", "shared_tokens": "0"}
        form |= {"answer_tokens": "2", "priority": "premium=0.2,bulk=0.5"}
        await api.client.post("/load", data=form, headers=HTML, follow_redirects=False)
        await until(lambda: not api.plugin.loads.is_active)
        view = api.plugin.loads.describe()
        assert view is not None
        assert [(line.name, line.num_finished) for line in view.classes] == [
            ("bulk", 5),
            ("no class", 3),
            ("premium", 2),
        ]
        assert all(line.mean_s is not None and line.p99_s is not None for line in view.classes)
        page = (await api.client.get("/load", headers=HTML)).text
        assert '<th scope="row">premium</th><td class="num">2</td>' in page
        assert 'value="premium=0.2,bulk=0.5"' in page
        await api.plugin.writer.settle()
        rows = fetch(
            api.plugin.database.path, "SELECT priority, count(*) FROM requests GROUP BY 1 ORDER BY 1"
        )
        assert rows == [(-10, 2), (0, 3), (10, 5)]


async def test_a_chat_of_the_playground_has_the_priority_of_its_settings() -> None:
    async with running_api() as api:
        asked = {"text": "hello", "priority": "premium", "max_tokens": "2"}
        answer = await api.client.post("/chat", data=asked, headers=HTML, follow_redirects=False)
        assert answer.status_code == 303, answer.text
        await until(lambda: api.plugin.host.num_open == 0 and api.engine.runner.num_steps >= 2)
        await api.plugin.writer.settle()
        rows = fetch(api.plugin.database.path, "SELECT kind, priority FROM requests")
        assert rows == [("chat", -10)]
        refused = await api.client.post("/chat", data={**asked, "priority": "royal"}, headers=HTML)
        assert refused.status_code == 422
        assert "the names premium, standard, bulk" in refused.text
