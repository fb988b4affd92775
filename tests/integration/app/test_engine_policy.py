"""`/api/engine/policy` over a fake engine: what is in force, changed, refused, and on record."""

import asyncio
from functools import partial
from typing import Any

import msgspec

from engine.records import Policies
from tests.support.api import MODEL, POLL_TIMEOUT_S, Api, ServedApi, running_api, served_api, until
from tests.support.fake_engine import FakeEngine

PATH = "/api/engine/policy"
DEFAULTS = {"policy": "fcfs", "preemption": "newest-first", "preemption_mode": "auto"}
HTML = {"accept": "text/html"}

AnyApi = Api | ServedApi


async def in_force(api: AnyApi) -> dict[str, Any]:
    answer = (await api.client.get(PATH)).json()
    return {name: answer[name] for name in DEFAULTS}


def has_commands(api: AnyApi, count: int) -> bool:
    return api.plugin.host._thread.num_commands == count


async def recorded(api: AnyApi, step: int) -> None:
    """Wait until a step is in the history."""
    path = f"/api/sessions/{api.plugin.hub.session_id}"
    async with asyncio.timeout(POLL_TIMEOUT_S):
        while (await api.client.get(path)).json().get("last_step", 0) < step:
            await asyncio.sleep(0.01)


async def test_it_says_what_is_in_force_and_what_there_is() -> None:
    async with running_api() as api:
        answer = await api.client.get(PATH)
        assert answer.status_code == 200
        assert answer.headers["cache-control"] == "no-store"
        assert answer.json() == {
            "step": 0,
            **DEFAULTS,
            "allowed": {
                "policy": ["fcfs", "priority"],
                "preemption": [
                    "newest-first",
                    "least-computed-first",
                    "oldest-first",
                    "smallest-residual",
                    "lowest-temperature",
                ],
                "preemption_mode": ["auto", "recompute"],
            },
            "priority_classes": {"premium": -10, "standard": 0, "bulk": 10},
            "priority_ageing_s": 1.0,
        }


async def test_a_change_is_in_force_on_record_and_in_the_state_when_it_is_answered() -> None:
    async with running_api() as api:
        answer = await api.client.post(PATH, json={"policy": "priority"})
        state = (await api.client.get("/api/engine/state?blocks=0")).json()
        assert answer.status_code == 200
        assert {**DEFAULTS, "policy": "priority"} == await in_force(api) == state["policies"]
        assert answer.json()["step"] == state["step"] == 1

        again = await api.client.post(
            PATH, json={"preemption": "oldest-first", "preemption_mode": "recompute"}
        )
        expected = {"policy": "priority", "preemption": "oldest-first", "preemption_mode": "recompute"}
        assert await in_force(api) == expected == {name: again.json()[name] for name in DEFAULTS}

        sid = api.plugin.hub.session_id
        await recorded(api, 2)
        replayed = []
        for step in (1, 2):
            found = (await api.client.get(f"/api/sessions/{sid}/state?step={step}&blocks=0")).json()
            replayed.append(found["policies"])
        assert replayed == [{**DEFAULTS, "policy": "priority"}, expected]
        records = (await api.client.get(f"/api/sessions/{sid}/chunks/1?format=records")).json()["items"]
        assert [event["type"] for record in records for event in record["events"]] == ["policies"] * 2
        await api.plugin.writer.settle()
        markers = (await api.client.get(f"/api/sessions/{sid}/markers")).json()["items"]
        notes = ("priority, newest-first, auto", "priority, oldest-first, recompute")
        assert markers == [
            {"step": step, "kind": "policies", "request_id": None, "note": note}
            for step, note in enumerate(notes, 1)
        ]


async def test_changes_during_a_step_take_effect_one_after_the_other_with_the_next() -> None:
    names = ["oldest-first", "smallest-residual", "lowest-temperature"]
    engine = FakeEngine()
    async with served_api(engine) as api:
        engine.runner.gate.clear()
        load = asyncio.create_task(
            api.client.post("/v1/completions", json={"model": MODEL, "prompt": "hi", "max_tokens": 20})
        )
        await until(lambda: engine.core.has_work)
        changes = []
        for number, name in enumerate(names):
            changes.append(asyncio.create_task(api.client.post(PATH, json={"preemption": name})))
            await until(partial(has_commands, api, number + 1))
        assert not any(change.done() for change in changes)
        engine.runner.gate.set()

        answers = [(await change).json() for change in changes]
        assert [answer["preemption"] for answer in answers] == names
        assert [answer["step"] for answer in answers] == [2, 2, 2]
        assert (await load).status_code == 200
        assert (await in_force(api))["preemption"] == names[-1]
        assert engine.core.policies == Policies("fcfs", names[-1], "auto")


REFUSED: list[tuple[Any, str | None, str]] = [
    ({}, None, "Nothing is to be changed; give policy or preemption or preemption_mode."),
    ({"policy": "lottery"}, "policy", "policy is 'lottery'; allowed: fcfs, priority."),
    ({"policy": None}, "policy", "policy is 'None'; allowed: fcfs, priority."),
    ({"preemption": 5}, "preemption", "preemption is '5'; allowed: newest-first, least-computed-first"),
    ({"preemption": "x" * 9999}, "preemption", "allowed: newest-first"),
    (
        {"preemption_mode": "swap"},
        "preemption_mode",
        "preemption_mode is 'swap'; allowed: auto, recompute; swap needs --swap-memory.",
    ),
    (
        {"policy": "priority", "colour": "red"},
        "colour",
        "'colour' is no field; there are policy, preemption, preemption_mode.",
    ),
    ([], None, "The body is not a JSON object"),
    ("policy", None, "The body is not a JSON object"),
]


async def test_what_cannot_be_is_refused_by_name_and_changes_nothing() -> None:
    async with running_api() as api:
        for body, param, message in REFUSED:
            answer = await api.client.post(PATH, json=body)
            problem = answer.json()
            assert answer.status_code == 400, body
            assert message in problem["detail"]
            assert len(problem["detail"]) < 250
            assert problem["param"] == param
        malformed = await api.client.post(PATH, content=b"{", headers={"content-type": "application/json"})
        assert (malformed.status_code, malformed.json()["code"]) == (400, "invalid_json")
        text = await api.client.post(PATH, content=b"{}", headers={"content-type": "text/plain"})
        assert text.status_code == 415
        large = await api.client.post(PATH, json={"policy": "x" * 20_000})
        assert large.status_code == 413
        assert await in_force(api) == DEFAULTS
        assert (await api.client.get(PATH)).json()["step"] == 0


async def test_swap_can_be_chosen_where_there_is_a_host_tier() -> None:
    async with running_api(FakeEngine(num_host_blocks=8)) as api:
        answer = await api.client.post(PATH, json={"preemption_mode": "swap"})
        assert (answer.status_code, answer.json()["preemption_mode"]) == (200, "swap")
        assert answer.json()["allowed"]["preemption_mode"] == ["auto", "recompute", "swap"]


async def test_a_form_says_the_same_with_and_without_scripts() -> None:
    async with running_api() as api:
        form = {"policy": "priority", "preemption": "", "back": "/live?x=1"}
        by_htmx = await api.client.post(PATH, data=form, headers={"hx-request": "true", **HTML})
        assert (by_htmx.status_code, by_htmx.json()["policy"]) == (200, "priority")
        plain = await api.client.post(
            PATH, data={**form, "policy": "fcfs"}, headers=HTML, follow_redirects=False
        )
        assert (plain.status_code, plain.headers["location"]) == (303, "/live?x=1")
        assert await in_force(api) == DEFAULTS
        elsewhere = await api.client.post(
            PATH, data={**form, "back": "//evil.example"}, headers=HTML, follow_redirects=False
        )
        assert (elsewhere.status_code, elsewhere.headers["location"]) == (303, "/live")


async def test_a_file_in_place_of_a_field_is_refused() -> None:
    async with running_api() as api:
        for files in ({"policy": ("x.txt", b"priority")}, {"policy": ("x.txt", b"a"), "back": ("y", b"")}):
            answer = await api.client.post(PATH, files=files, headers=HTML)
            assert answer.status_code == 400
            assert "is a file in the form; send it as a plain field." in answer.text
        as_fields = await api.client.post(PATH, files={"policy": (None, b"priority")})
        assert (as_fields.status_code, as_fields.json()["policy"]) == (200, "priority")


async def test_a_form_without_a_choice_changes_nothing_and_leads_back() -> None:
    async with running_api() as api:
        form = dict.fromkeys(DEFAULTS, "") | {"back": "/live"}
        answer = await api.client.post(PATH, data=form, headers=HTML, follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (303, "/live")
        assert (await api.client.get(PATH)).json()["step"] == 0


async def test_a_page_without_scripts_offers_what_there_is() -> None:
    async with running_api() as api, running_api(FakeEngine(num_host_blocks=8)) as swapping:
        page = (await api.client.get("/live/policies")).text
        assert 'action="/api/engine/policy"' in page
        assert "as it is, newest-first" in page
        assert '<option value="oldest-first">' in page
        assert '<option value="swap">' not in page
        assert '<option value="swap">' in (await swapping.client.get("/live/policies")).text
        live = (await api.client.get("/live")).text
        assert 'href="/live/policies"' in live
        assert "http-equiv" not in page  # a refresh would take back what was chosen


async def test_pages_of_other_sites_cannot_change_it() -> None:
    async with running_api() as api:
        answer = await api.client.post(
            PATH, json={"policy": "priority"}, headers={"origin": "http://evil.example"}
        )
        assert answer.status_code == 403
        assert await in_force(api) == DEFAULTS


async def test_while_the_model_loads_there_is_nothing_to_change() -> None:
    engine = FakeEngine()
    engine.load_gate.clear()
    async with running_api(engine, wait_ready=False) as api:
        for answer in (await api.client.get(PATH), await api.client.post(PATH, json={"policy": "priority"})):
            assert (answer.status_code, answer.json()["code"]) == (503, "model_loading")
            assert answer.headers["retry-after"] == "1"
        empty = (await api.client.get("/api/engine/state")).json()
        assert (empty["policies"], empty["host"]) == (None, {"total": 0, "used": 0, "pinned": 0})
        engine.load_gate.set()


async def test_policies_outlive_a_failed_step() -> None:
    engine = FakeEngine()
    async with running_api(engine) as api:
        await api.client.post(PATH, json={"policy": "priority"})
        engine.runner.failures = 1
        assert (await api.complete()).status_code == 503
        assert (await in_force(api))["policy"] == "priority"
        assert engine.core.policies.policy == "priority"


async def test_a_server_that_stops_takes_no_change() -> None:
    async with running_api() as api:
        api.plugin.host.begin_drain()
        answer = await api.client.post(PATH, json={"policy": "priority"})
        assert (answer.status_code, answer.json()["code"]) == (503, "server_shutdown")
        assert msgspec.to_builtins(api.engine.core.policies)["policy"] == "fcfs"
