"""The scheduler's decisions as pages and in the drawer, of the running session and of one from before."""

import asyncio
import html
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from app.errors import HistoryUnavailableError
from app.services.sessions import SessionReader
from tests.support.api import ServedApi, running_api, served_api, until
from tests.support.recorded import make_small_engine, read_preemptions, send_chats, served_copy

HTML = {"accept": "text/html"}
DRAWER = {"hx-request": "true"}
HOST_BLOCKS = 12


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("recording") / "data"
    return folder, asyncio.run(_record(folder))


async def _record(data_dir: Path) -> str:
    engine = make_small_engine(num_blocks=32, num_host_blocks=HOST_BLOCKS, preemption="smallest-residual")
    async with served_api(engine, data_dir=data_dir) as api:
        await send_chats(api, num=20)
        snapshot = api.plugin.hub.snapshot
        assert snapshot is not None
        assert snapshot.totals.num_preemptions > 0
        return api.plugin.hub.session_id


@pytest.fixture
async def recorded(recording: tuple[Path, str], tmp_path: Path) -> AsyncIterator[tuple[ServedApi, str]]:
    folder, session = recording
    async with served_copy(folder, tmp_path / "recorded") as api:
        yield api, session


def read_candidates(text: str) -> list[list[tuple[int, float, bool]]]:
    """Return (seq_id, score, whether preempted) of the tables of candidates in a page."""
    tables = re.findall(r'<table class="candidates">(.*?)</table>', text, re.DOTALL)
    row = re.compile(
        r'<tr(?P<victim> class="is-victim")? data-seq="(?P<seq>\d+)">.*?class="num score">(?P<score>[^<]*)<',
        re.DOTALL,
    )
    return [
        [(int(m["seq"]), float(m["score"].replace(",", "")), bool(m["victim"])) for m in row.finditer(table)]
        for table in tables
    ]


def expected_candidates(event: dict[str, Any]) -> list[tuple[int, float, bool]]:
    in_order = sorted(event["candidates"], key=lambda candidate: (candidate[1], -candidate[0]))  # by fcfs
    return [(seq_id, score, seq_id == event["seq_id"]) for seq_id, score in in_order]


async def test_after_a_restart_every_preemption_has_a_page_with_all_its_candidates(
    recorded: tuple[ServedApi, str],
) -> None:
    api, session = recorded
    preemptions = await read_preemptions(api.client, session)
    assert preemptions
    for step, events in preemptions.items():
        page = await api.client.get(f"/s/{session}/decisions/{step}", headers=HTML)
        assert page.status_code == 200
        assert "<!doctype html>" in page.text.lower()
        assert read_candidates(page.text) == [expected_candidates(event) for event in events]
        part = await api.client.get(f"/s/{session}/decisions/{step}", headers=DRAWER)
        assert part.text.startswith("<article")
        assert read_candidates(part.text) == read_candidates(page.text)
        assert not re.search(r">sequence \d+<", page.text), "all are called by their request's id"


async def test_requests_and_neighbouring_preemptions_are_a_link_away(
    recorded: tuple[ServedApi, str],
) -> None:
    api, session = recorded
    steps = sorted(await read_preemptions(api.client, session))
    assert len(steps) > 1
    text = (await api.client.get(f"/s/{session}/decisions/{steps[0]}", headers=HTML)).text
    assert f'href="/s/{session}/decisions/{steps[1]}"' in text
    assert "Earlier preemption" not in text
    assert f'href="/s/{session}?step={steps[0]}"' in text
    for address in set(re.findall(r'href="(/(?:r|s)/[^"]+)"', text)):
        answer = await api.client.get(html.unescape(address), headers=HTML)
        assert answer.status_code == 200, address


async def test_the_page_of_a_step_lists_its_decisions_for_those_without_scripts(
    recorded: tuple[ServedApi, str],
) -> None:
    api, session = recorded
    preemptions = await read_preemptions(api.client, session)
    step, events = max(preemptions.items(), key=lambda item: len(item[1]))
    text = (await api.client.get(f"/s/{session}?step={step}", headers=HTML)).text
    entries = re.findall(r'<span class="sign k-(\w+)"', text)
    assert len([kind for kind in entries if kind in {"swap", "recompute"}]) == len(events)
    assert text.count(f'href="/s/{session}/decisions/{step}"') >= len(events)
    panels = (await api.client.get(f"/s/{session}/panels?step={step}")).text
    assert f'id="decision-{step}-0"' in panels


async def test_the_marker_of_a_preemption_says_its_mode(recorded: tuple[ServedApi, str]) -> None:
    api, session = recorded
    markers = (await api.client.get(f"/api/sessions/{session}/markers")).json()["items"]
    modes = sorted((marker["step"], marker["note"]) for marker in markers if marker["kind"] == "preempt")
    preemptions = await read_preemptions(api.client, session)
    assert modes == sorted((step, event["mode"]) for step, events in preemptions.items() for event in events)


async def test_a_recorded_step_shows_host_tier_and_policies(recorded: tuple[ServedApi, str]) -> None:
    api, session = recorded
    facts = (await api.client.get(f"/api/sessions/{session}/state?blocks=0")).json()
    text = (await api.client.get(f"/s/{session}", headers=HTML)).text
    host = facts["host"]
    assert f"{host['used']} of {HOST_BLOCKS} blocks, {host['pinned']} kept" in text
    assert 'data-preemption="smallest-residual"' in text
    assert 'id="policy-form"' not in text, "what is recorded is not changed"


async def test_what_is_not_recorded_is_said_in_page_and_drawer(recorded: tuple[ServedApi, str]) -> None:
    api, session = recorded
    for path, words in (
        (f"/s/{session}/decisions/999999", "Step 999999 is not recorded"),
        ("/s/nowhere/decisions/1", "No session"),
    ):
        page = await api.client.get(path, headers=HTML)
        assert page.status_code == 404
        assert words in html.unescape(page.text)
        part = await api.client.get(path, headers=DRAWER)
        assert part.status_code == 200
        assert "It cannot be shown." in part.text
        assert words in html.unescape(part.text)
    for step in ("0", "-1", "x", "9" * 30):
        assert (await api.client.get(f"/s/{session}/decisions/{step}")).status_code == 400


async def test_the_live_view_lists_its_newest_preemptions_and_tells_all_of_them() -> None:
    engine = make_small_engine(num_blocks=32, num_host_blocks=HOST_BLOCKS, preemption="least-computed-first")
    async with served_api(engine) as api:
        await send_chats(api, num=20)
        await until(lambda: not (api.plugin.hub.snapshot and api.plugin.hub.snapshot.running))
        panels = (await api.client.get("/live/panels")).text
        steps = [int(step) for step in re.findall(r'href="/live/decisions/(\d+)"', panels)]
        assert steps
        assert steps == sorted(steps, reverse=True)
        known = await read_preemptions(api.client, api.plugin.hub.session_id)
        for step in set(steps) & known.keys():
            text = (await api.client.get(f"/live/decisions/{step}", headers=DRAWER)).text
            assert read_candidates(text) == [expected_candidates(event) for event in known[step]]


async def test_decisions_of_the_live_session_need_no_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> NoReturn:
        raise HistoryUnavailableError("The disk is gone.")

    async with served_api(make_small_engine(num_blocks=32, num_host_blocks=HOST_BLOCKS)) as api:
        await send_chats(api, num=14)
        newest = api.plugin.hub.decisions.newest_preemptions(1)
        assert newest
        monkeypatch.setattr(SessionReader, "decisions", refuse)
        monkeypatch.setattr(SessionReader, "near_preemptions", refuse)
        response = await api.client.get(f"/live/decisions/{newest[0][0].step}", headers=HTML)
        assert response.status_code == 200
        assert read_candidates(response.text)
        forgotten = await api.client.get("/live/decisions/999999", headers=DRAWER)
        assert "The disk is gone." in forgotten.text
        assert (await api.client.get("/live/decisions/999999", headers=HTML)).status_code == 503


async def test_the_live_page_offers_the_policies_that_there_are() -> None:
    async with running_api() as api:
        text = (await api.client.get("/live", headers=HTML)).text
        assert 'action="/api/engine/policy"' in text
        assert re.search(r'<option value="newest-first" selected>', text)
        assert 'value="swap"' not in text, "there is no host tier"
        changed = await api.client.post(
            "/api/engine/policy", data={"preemption": "oldest-first"}, headers={"hx-request": "true"}
        )
        assert changed.status_code == 200
        panels = (await api.client.get("/live/panels")).text
        assert 'data-preemption="oldest-first"' in panels
