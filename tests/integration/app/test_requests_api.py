"""`/api/requests`, `/requests`, `/r/{id}` and metrics over a fake engine on a real port."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import pytest

from app.errors import HistoryUnavailableError
from app.history.metric_log import MetricLog
from app.web import chart_context
from app.web.moments import parse_moment
from tests.support.api import POLL_TIMEOUT_S, ServedApi, served_api, until
from tests.support.fake_engine import FakeEngine

PAYLOAD = "<img src=x onerror=alert(1)><script>alert(2)</script>[x](javascript:alert(3))"
HTML = {"accept": "text/html"}


@pytest.fixture
async def api() -> AsyncIterator[ServedApi]:
    async with served_api(FakeEngine(num_blocks=14, max_model_len=56)) as served:
        await until(lambda: served.plugin.database.is_open)
        yield served


async def complete(api: ServedApi, prompt: Any = "hello", /, **fields: Any) -> dict[str, Any]:
    body = {"model": "fake", "prompt": prompt, "max_tokens": 8, **fields}
    answer: dict[str, Any] = (await api.client.post("/v1/completions", json=body)).json()
    return answer


async def recorded(api: ServedApi) -> None:
    """Wait until all that has happened is in the history."""
    hub = api.plugin.hub
    await until(lambda: hub.snapshot is not None and not hub.snapshot.sequences)
    assert hub.snapshot is not None
    await api.plugin.writer.settle()
    async with asyncio.timeout(POLL_TIMEOUT_S):
        while (await get(api, f"/api/sessions/{hub.session_id}"))["last_step"] < hub.snapshot.step:
            await asyncio.sleep(0.01)


async def get(api: ServedApi, path: str, status: int = 200) -> dict[str, Any]:
    response = await api.client.get(path)
    assert response.status_code == status, response.text
    found: dict[str, Any] = response.json()
    return found


async def ids(api: ServedApi, query: str) -> list[str]:
    return [item["id"] for item in (await get(api, f"/api/requests?{query}"))["items"]]


async def test_a_request_has_its_whole_life_with_tokens_that_make_up_the_answer(api: ServedApi) -> None:
    answers = await asyncio.gather(
        *(complete(api, f"{number} prompt of mine", max_tokens=24, temperature=0) for number in range(4))
    )
    await recorded(api)
    lives = [await get(api, f"/api/requests/{answer['id']}") for answer in answers]

    assert any(life["preemptions"] for life in lives)
    for answer, life in zip(answers, lives, strict=True):
        (choice,) = life["choices"]
        assert "".join(token["text"] for token in choice["tokens"]) == answer["choices"][0]["text"]
        assert len(choice["tokens"]) == life["num_output_tokens"] == 24
        assert [token["index"] for token in choice["tokens"]] == list(range(24))
        assert choice["tokens"][0]["step"] == life["first_token_step"]
        assert choice["tokens"][-1]["time"] == life["ended"]
        assert len(life["preemptions"]) == life["num_preemptions"]
        kinds = [phase["kind"] for phase in choice["phases"]]
        assert kinds.count("preempted") == life["num_preemptions"] == kinds.count("recompute")
        assert choice["blocks"][-1]["num_blocks"] == 0
        assert sum(chunk["num_tokens"] for chunk in choice["prompt_chunks"]) >= life["num_prompt_tokens"]
        assert life["steps"]["missing"] == []
        assert life["text"]["outputs"] == [answer["choices"][0]["text"]]


async def test_filters_let_through_what_they_say(api: ServedApi) -> None:
    first = await complete(api, "find the lighthouse")
    second = await complete(api, "nothing in here", max_tokens=30)
    refused = await api.client.post("/v1/completions", json={"model": "fake", "prompt": "x" * 200})
    await recorded(api)
    sid = api.plugin.hub.session_id
    everything = (await get(api, "/api/requests"))["items"]

    assert [item["id"] for item in everything][:2] == [second["id"], first["id"]]
    assert refused.status_code == 400
    assert await ids(api, "q=LIGHTHOUSE") == [first["id"]]
    assert await ids(api, f"q={first['id'][:20]}") == [first["id"]]
    assert await ids(api, f"q={first['id'].partition('-')[2][:9]}") == [first["id"]]
    assert await ids(api, "q=%25") == []
    assert await ids(api, "q=prompts") == [], "the names of the stored document are no text"
    assert await ids(api, "min_tokens=40") == [second["id"]]
    assert await ids(api, "status=failed,aborted") == []
    assert set(await ids(api, f"status=finished&kind=api&session={sid}")) == {first["id"], second["id"]}
    assert await ids(api, "kind=chat") == []
    arrived = everything[0]["arrived"]
    assert await ids(api, f"since={arrived}") == [second["id"]]
    assert await ids(api, f"until={arrived}") == [first["id"]]
    assert arrived.endswith("Z")
    assert parse_moment(arrived, "arrived") > 0


async def test_pages_of_the_list_hold_every_request_once(api: ServedApi) -> None:
    made = [(await complete(api, f"number {number}", max_tokens=1))["id"] for number in range(7)]
    await recorded(api)
    found: list[str] = []
    cursor = ""
    while True:
        page = await get(api, f"/api/requests?limit=3{cursor}")
        found += [item["id"] for item in page["items"]]
        if page["next"] is None:
            break
        cursor = f"&before={page['next']}"

    assert found == made[::-1]


REFUSED = [
    ("/api/requests/nobody", 404, "No request 'nobody' is recorded."),
    ("/api/requests?q=%00", 400, "q has a zero byte"),
    ("/api/requests?min_preemptions=many", 400, "min_preemptions is 'many'; allowed: a whole number"),
    ("/api/requests?limit=0", 400, "limit is '0'; allowed: a whole number, 1 to 500."),
    (
        "/api/requests?since=soon",
        400,
        "since: 'soon' is no date and time; write one",
    ),
    ("/api/requests?colour=red", 400, "'colour' is no parameter"),
    ("/api/requests?before=zzz", 400, "before must be the `next`"),
    ("/api/sessions/nobody/metrics", 404, "No session 'nobody' is recorded."),
    ("/api/sessions/nobody/metrics?points=1", 400, "points is '1'"),
]


async def test_what_cannot_be_answered_says_why(api: ServedApi) -> None:
    for path, status, text in REFUSED:
        problem = await get(api, path, status)
        assert text in problem["detail"]
        assert problem["status"] == status


async def test_pages_show_markup_from_users_and_models_as_text(api: ServedApi) -> None:
    answer = await complete(api, PAYLOAD[:40], max_tokens=4)
    await recorded(api)
    request_id = answer["id"]
    for path in ("/requests", f"/requests?q={PAYLOAD[:20]}", f"/r/{request_id}"):
        page = (await api.client.get(path, headers=HTML)).text
        assert request_id in page
        assert "<img src=x" not in page
        assert "<script>alert" not in page
    assert "&lt;img src=x onerror=alert(1)&gt;" in (await api.client.get(f"/r/{request_id}")).text


async def test_the_page_of_a_request_shows_its_life_and_links_into_its_session(api: ServedApi) -> None:
    answer = await complete(api, "hello there", n=2, max_tokens=5)
    await recorded(api)
    request_id, sid = answer["id"], api.plugin.hub.session_id
    page = (await api.client.get(f"/r/{request_id}?choice=1", headers=HTML)).text

    for phase in ("queued", "prefill", "decode"):
        assert f'class="phase phase-{phase}"' in page
    links = re.findall(rf'href="/s/{sid}\?step=(\d+)&amp;request={request_id}"', page)
    assert len(links) >= 5
    assert 'aria-current="true">Answer 2' in page
    assert "hx-get" not in page.partition("<main")[2], "nothing changes any more"
    assert (await api.client.get(f"/r/{request_id}?choice=2", headers=HTML)).status_code == 400
    missing = await api.client.get("/r/nobody", headers=HTML)
    assert missing.status_code == 404
    assert "text/html" in missing.headers["content-type"]


async def test_an_open_request_is_listed_with_what_the_engine_has_now(api: ServedApi) -> None:
    api.engine.runner.step_s = 0.02
    task = asyncio.create_task(complete(api, "wait", max_tokens=40))
    hub = api.plugin.hub

    def has_tokens() -> bool:
        return hub.snapshot is not None and any(
            view.num_output_tokens >= 3 for view in hub.snapshot.sequences.values()
        )

    await until(has_tokens)
    await api.plugin.writer.settle()
    page = (await api.client.get("/requests", headers=HTML)).text
    part = (await api.client.get("/requests?status=running", headers={"HX-Request": "true"})).text
    request_id = (await ids(api, "status=running"))[0]
    life_page = (await api.client.get(f"/r/{request_id}", headers=HTML)).text
    await task

    assert 'hx-trigger="every 2s"' in page
    assert "<html" not in part
    assert part.lstrip().startswith('<div id="request-list"')
    assert "status-running" in part
    counts = [int(count) for count in re.findall(r'<td class="num">(\d+)</td>', part)]
    assert counts[2] >= 3, "tokens of the answer so far"
    assert f'hx-get="/r/{request_id}' in life_page


async def test_a_bad_filter_leaves_the_page_usable_and_names_the_field(api: ServedApi) -> None:
    page = await api.client.get("/requests?since=soon", headers=HTML)
    assert page.status_code == 400
    assert "is no date and time" in page.text
    assert 'name="since" value="soon"' in page.text
    assert 'aria-invalid="true"' in page.text
    part = await api.client.get("/requests?since=soon", headers={"HX-Request": "true"})
    assert (part.status_code, "is no date and time" in part.text) == (200, True)


def refuse_to_read() -> NoReturn:
    raise HistoryUnavailableError("The history file is damaged.")


async def test_without_a_history_pages_say_so_and_the_api_answers_503(
    api: ServedApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.plugin.database, "read", refuse_to_read)

    page = await api.client.get("/requests", headers=HTML)
    assert page.status_code == 503
    assert "The history cannot be read." in page.text
    assert 'id="request-filter"' in page.text
    problem = await get(api, "/api/requests", 503)
    assert problem["code"] == "history_unavailable"
    assert (await api.client.get("/r/some", headers=HTML)).status_code == 503


async def test_nothing_is_shown_of_texts_that_were_not_kept(api: ServedApi) -> None:
    api.plugin.recorder.switch_text(is_on=False)
    answer = await complete(api, "my secret words", max_tokens=6)
    await recorded(api)
    life = await get(api, f"/api/requests/{answer['id']}")
    page = (await api.client.get(f"/r/{answer['id']}", headers=HTML)).text

    assert life["text"] is None
    assert [token["token_id"] for token in life["choices"][0]["tokens"]] == [None] * 6
    assert [token["text"] for token in life["choices"][0]["tokens"]] == [None] * 6
    assert "secret" not in json.dumps(life) + page
    assert "recording of text was off" in page


async def test_metrics_of_a_session_add_up_however_they_are_merged(
    api: ServedApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chart_context, "SETTLING_S", -1.0)  # the second that is on is complete, too
    for number in range(3):
        await complete(api, f"{number} prompt", max_tokens=10)
    await recorded(api)
    (log,) = [part for part in api.plugin.recorder._parts if isinstance(part, MetricLog)]
    await until(lambda: log._sums is None)
    await api.plugin.writer.settle()
    path = f"/api/sessions/{api.plugin.hub.session_id}/metrics"
    fine, coarse = await get(api, path), await get(api, f"{path}?points=2")

    for metrics in (fine, coarse):
        items = metrics["items"]
        assert sum(item["num_finished"] for item in items) == 3
        assert sum(item["num_ttft"] for item in items) == 3
        assert sum(item["num_decode_tokens"] for item in items) > 20
        assert items[-1]["num_running"] == 0
        assert items[-1]["last_step"] == (api.plugin.hub.snapshot.step if api.plugin.hub.snapshot else 0)
        assert items[-1]["num_free"] + items[-1]["num_cached"] + items[-1]["num_used"] == 14
        assert all(item["time"].endswith("Z") for item in items)
    assert len(coarse["items"]) <= 2
    later = await get(api, f"{path}?since=2199-01-01")
    assert later["items"] == []
    page = (await api.client.get(f"/s/{api.plugin.hub.session_id}/charts", headers=HTML)).text
    assert "Decode tok/s" in page
    assert f'data-charts="{path}"' in page
    rows = re.findall(r"step=(\d+)", page.partition("<tbody>")[2])
    assert [int(step) for step in rows] == [item["last_step"] for item in fine["items"]]


async def test_admissions_and_preemptions_say_what_was_found_kept_lost_and_why() -> None:
    """Over a tiny pool with a host tier: victims are swapped, and come back from there."""
    engine = FakeEngine(
        num_blocks=14, max_model_len=56, num_host_blocks=32, preemption_mode="swap", preemption_quantum=2
    )
    async with served_api(engine) as api:
        await until(lambda: api.plugin.database.is_open)
        answers = await asyncio.gather(
            *(complete(api, f"{number} prompt of mine", max_tokens=24, temperature=0) for number in range(4))
        )
        await recorded(api)
        lives = [await get(api, f"/api/requests/{answer['id']}") for answer in answers]
        ids_ = {life["id"] for life in lives}
        victims = [life for life in lives if life["preemptions"]]
        assert victims
        for life in victims:
            (choice,) = life["choices"]
            admissions = [event for event in life["events"] if event["kind"] in {"admitted", "resumed"}]
            assert admissions[0]["num_host_tokens"] == 0
            assert set(admissions[0]["miss"]) == {"kind", "position", "step", "request_id"}
            for event, resumed in zip(life["preemptions"], admissions[1:], strict=True):
                assert event["policy"] == "newest-first"
                assert event["mode"] == ("swap" if event["num_tokens_kept"] else "recompute")
                assert event["num_tokens_lost"] >= 0
                assert (event["recompute_ns"], event["swap_ns"]) == (0, 0), "nothing was measured"
                assert event["beneficiary"] in ids_
                assert event["need"] == "block"
                assert event["candidates"][0]["request_id"] == life["id"], "it would have gone first"
                candidates = {(c["request_id"], c["choice_index"]): c["score"] for c in event["candidates"]}
                assert candidates[life["id"], 0] == min(candidates.values())
                assert resumed["num_cached_tokens"] + resumed["num_host_tokens"] >= event["num_tokens_kept"]
            assert [victim["step"] for victim in choice["victims"]] == [
                e["step"] for e in life["preemptions"]
            ]
        assert any(event["num_tokens_kept"] for life in victims for event in life["preemptions"])

        page = (await api.client.get(f"/r/{victims[0]['id']}", headers=HTML)).text
        assert "Found in host memory" in page
        assert "Tokens kept" in page
        assert "newest-first, swap" in page


async def test_a_preemption_says_that_somebody_more_urgent_needed_the_slot() -> None:
    engine = FakeEngine(max_num_seqs=1, policy="priority", recompute_ns_per_token=2e6, swap_ns_per_block=1e6)
    engine.runner.step_s = 0.01
    async with served_api(engine) as api:
        await until(lambda: api.plugin.database.is_open)
        hub = api.plugin.hub
        task = asyncio.create_task(complete(api, "in bulk", max_tokens=60, priority="bulk"))
        await until(
            lambda: hub.snapshot is not None and any(v.num_output_tokens for v in hub.snapshot.running)
        )
        urgent = (await complete(api, "in haste", max_tokens=2, priority="premium"))["id"]
        bulk = (await task)["id"]
        await recorded(api)
        (event,) = (await get(api, f"/api/requests/{bulk}"))["preemptions"]
        assert (event["need"], event["beneficiary"]) == ("slot", urgent)
        assert [(c["request_id"], c["priority"]) for c in event["candidates"]] == [(bulk, 10)]
        page = (await api.client.get(f"/r/{bulk}", headers=HTML)).text
        assert re.search(r"recompute <span class=.sub.>reckoned: recompute \S+ ms, swap \S+ ms</span>", page)
        assert f'{urgent}</a> <span class="sub">more urgent, waited for a slot</span>' in page


async def test_a_miss_names_the_request_that_differs() -> None:
    async with served_api(FakeEngine()) as api:
        await until(lambda: api.plugin.database.is_open)
        first = await complete(api, "the same beginning, then this")
        second = await complete(api, "the same beginning, then that")
        await recorded(api)
        life = await get(api, f"/api/requests/{second['id']}")
        (admitted,) = [event for event in life["events"] if event["kind"] == "admitted"]
        assert admitted["miss"] == {
            "kind": "differs",
            "position": 27,
            "step": 0,
            "request_id": first["id"],
        }
        assert admitted["num_cached_tokens"] == 24
        page = (await api.client.get(f"/r/{second['id']}", headers=HTML)).text
        assert f'from what was cached by request <a class="mono" href="/r/{first["id"]}"' in page
