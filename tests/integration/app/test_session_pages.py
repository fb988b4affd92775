"""Pages of recorded sessions without a browser: what they say, also when there is nothing to show."""

import asyncio
import html
import json
import re
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NoReturn

import pytest

from app.db.database import DATABASE_FILE, Database
from app.errors import HistoryUnavailableError
from tests.support.api import ServedApi, running_api, served_api
from tests.support.fake_engine import FakeEngine
from tests.support.history import session_values
from tests.support.recorded import record_session, served_copy

HTML = {"accept": "text/html"}
SWAP = {"hx-request": "true"}


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("recording") / "data"
    return folder, asyncio.run(record_session(folder, num=14))


@pytest.fixture
async def recorded(recording: tuple[Path, str], tmp_path: Path) -> AsyncIterator[tuple[ServedApi, str]]:
    folder, session = recording
    async with served_copy(folder, tmp_path / "recorded") as api:
        yield api, session


async def get_text(api: ServedApi, path: str, status: int = 200) -> str:
    response = await api.client.get(path, headers=HTML)
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("text/html")
    return response.text


async def last_step(api: ServedApi, session: str) -> int:
    response = await api.client.get(f"/api/sessions/{session}")
    return int(response.json()["last_step"])


async def test_the_list_names_the_run_before_and_the_one_that_runs(recorded: tuple[ServedApi, str]) -> None:
    api, session = recorded
    text = await get_text(api, "/sessions")
    assert text.index(f'id="session-{api.plugin.hub.session_id}"') < text.index(f'id="session-{session}"')
    assert re.search(r"status-running\">running<", text)
    assert re.search(r"status-stopped\">stopped<", text)
    assert f'href="/s/{session}"' in text
    assert re.search(r'<time datetime="20\d\d-\d\d-\d\dT[\d:.]+Z">20\d\d-\d\d-\d\d [\d:]{8} UTC</time>', text)
    assert re.search(rf'href="/requests\?session={session}" [^>]*>14<', text)


async def test_a_step_s_page_shows_the_recorded_state_as_tables(recorded: tuple[ServedApi, str]) -> None:
    api, session = recorded
    last = await last_step(api, session)
    for step in (1, last // 2, last):
        state = (await api.client.get(f"/api/sessions/{session}/state?step={step}")).json()
        text = await get_text(api, f"/s/{session}?step={step}")
        assert f'id="stat-step">{step:,}<' in text
        tables = (await api.client.get(f"/s/{session}/tables?step={step}")).text
        for name in ("free", "cached", "active", "tail", "shared", "reserved"):
            number = sum(block["state"] == name for block in state["blocks"])
            for part in (text, tables):
                assert re.search(rf'<th scope="row">{name}</th><td class="num">{number}</td>', part)
        panels = (await api.client.get(f"/s/{session}/panels?step={step}")).text
        for part in (text, panels):
            assert [int(slot) for slot in re.findall(r'data-slot="(\d+)"', part)] == [
                view["slot"] for view in state["running"]
            ]
        assert 'id="engine-step" value="' + str(step) in panels


async def test_the_last_step_is_shown_when_none_is_asked_for(recorded: tuple[ServedApi, str]) -> None:
    api, session = recorded
    last = await last_step(api, session)
    text = await get_text(api, f"/s/{session}")
    assert f'id="stat-step">{last:,}<' in text
    assert f'rel="prev" href="/s/{session}?step={last - 1}"' in text
    assert 'rel="next"' not in text
    assert 'rel="prev"' not in await get_text(api, f"/s/{session}?step=1")
    assert 'data-gaps="[]"' in text


async def test_what_is_not_recorded_is_an_error_page_that_says_what_is(
    recorded: tuple[ServedApi, str],
) -> None:
    api, session = recorded
    last = await last_step(api, session)
    outside = await get_text(api, f"/s/{session}?step={last + 1}", 404)
    assert f"has steps 1 to {last}." in outside
    assert f'href="/s/{session}?step=1">First step, 1<' in outside
    assert f'href="/s/{session}?step={last}">Last step, {last:,}<' in outside
    for text in (outside, await get_text(api, "/s/nobody", 404), await get_text(api, "/r/nobody", 404)):
        assert '<nav aria-label="Pages">' in text
    assert "is recorded" in await get_text(api, "/s/nobody", 404)
    assert 'href="/sessions">All sessions<' in await get_text(api, "/s/nobody", 404)
    for step in ("x", "-3", "1.5", "9" * 30):
        assert "step is" in await get_text(api, f"/s/{session}?step={step}", 400)
    assert "before must be" in await get_text(api, "/sessions?before=yesterday", 400)


async def test_the_state_before_the_first_step_is_step_0(recorded: tuple[ServedApi, str]) -> None:
    api, session = recorded
    text = await get_text(api, f"/s/{session}?step=0")
    assert 'id="stat-step">0<' in text
    assert f'rel="next" href="/s/{session}?step=1"' in text


async def test_a_session_whose_steps_were_given_up_leads_to_what_is_left_of_it(
    recorded: tuple[ServedApi, str], tmp_path: Path
) -> None:
    api, session = recorded
    with sqlite3.connect(tmp_path / "recorded" / DATABASE_FILE) as file:
        file.execute("UPDATE sessions SET first_step = last_step + 1 WHERE id = ?", (session,))
    text = await get_text(api, f"/s/{session}?step=3", 404)
    assert "were given up for space" in text
    assert f'href="/requests?session={session}"' in text
    assert f'href="/s/{session}/charts"' in text
    assert "First step" not in text


async def test_a_request_that_the_session_lacks_is_said_to_be_none_of_it(
    recorded: tuple[ServedApi, str],
) -> None:
    api, session = recorded
    unknown = await get_text(api, f"/s/{session}?step=5&request=no%3Cpe")
    assert "This session has no request no&lt;pe." in unknown
    state = (await api.client.get(f"/api/sessions/{session}/state?step=5")).json()
    known = state["running"][0]["request_id"]
    text = await get_text(api, f"/s/{session}?step=5&request={known}")
    assert "This session has no request" not in text
    assert f'href="/r/{known}"' in text


async def test_rows_of_the_list_have_names_of_their_own_and_say_what_is_not_kept(
    recorded: tuple[ServedApi, str], tmp_path: Path
) -> None:
    api, session = recorded
    with sqlite3.connect(tmp_path / "recorded" / DATABASE_FILE) as file:
        file.execute("UPDATE sessions SET records_text = 0 WHERE id = ?", (session,))
    text = await get_text(api, "/sessions")
    names = re.findall(r'<(?:button|summary)[^>]*aria-label="([^"]+)"', text)
    assert len(names) == len(set(names)) > 5
    assert text.count("texts not kept") == 1
    assert f'href="/s/{session}/charts"' in text
    page = await get_text(api, f"/s/{session}?step=1")
    assert "texts not kept" in page
    assert f'href="/s/{session}/charts"' in page
    assert "texts not kept" not in await get_text(api, f"/s/{api.plugin.hub.session_id}")


async def test_gaps_are_told_to_the_page_and_stepped_over(
    recorded: tuple[ServedApi, str], tmp_path: Path
) -> None:
    api, session = recorded
    with sqlite3.connect(tmp_path / "recorded" / DATABASE_FILE) as file:
        found = file.execute(
            "SELECT first_step, num_steps FROM chunks WHERE session_id = ? ORDER BY first_step DESC LIMIT 1",
            (session,),
        ).fetchone()
        file.execute("DELETE FROM chunks WHERE session_id = ? AND first_step = ?", (session, found[0]))
    first, num_steps = found
    text = await get_text(api, f"/s/{session}?step={first - 1}")
    gaps = re.search(r'data-gaps="([^"]*)"', text)
    assert gaps is not None
    assert json.loads(html.unescape(gaps.group(1))) == [{"first_step": first, "num_steps": num_steps}]
    assert f'rel="next" href="/s/{session}?step={first + num_steps - 1}"' in text
    lost = await get_text(api, f"/s/{session}?step={first}", 404)
    assert f"steps {first} to {first + num_steps - 1} were lost" in lost
    assert f'href="/s/{session}?step={first + num_steps - 1}">' in lost


async def test_notes_stars_and_deletion_work_as_plain_forms(recorded: tuple[ServedApi, str]) -> None:
    api, session = recorded

    async def post(path: str, status: int = 303, **data: str) -> str:
        response = await api.client.post(f"/s/{session}/{path}", data=data, headers=HTML)
        assert response.status_code == status, response.text
        return str(response.headers.get("location", ""))

    assert await post("note", note="<script>alert(1)</script> slow") == f"/sessions#session-{session}"
    await post("star", on="1")
    text = await get_text(api, "/sessions")
    assert "&lt;script&gt;alert(1)&lt;/script&gt; slow" in text
    assert "<script>alert" not in text
    assert "★" in text
    await post("star", on="0")
    assert "★" not in await get_text(api, "/sessions")
    await post("star", 400, on="maybe")
    await post("note", 400, note="x" * 3000)
    assert await post("delete") == "/sessions"
    assert f"session-{session}" not in await get_text(api, "/sessions")
    await get_text(api, f"/s/{session}", 404)


async def test_the_running_session_cannot_be_deleted(recorded: tuple[ServedApi, str]) -> None:
    api, _ = recorded
    response = await api.client.post(f"/s/{api.plugin.hub.session_id}/delete", headers=HTML)
    assert response.status_code == 409
    assert "it can be deleted once its server has ended" in response.text


async def test_bookmarks_are_made_and_removed_with_and_without_scripts(
    recorded: tuple[ServedApi, str],
) -> None:
    api, session = recorded
    path = f"/s/{session}/bookmarks"
    plain = await api.client.post(path, data={"step": "7", "note": "<i>here</i>"}, headers=HTML)
    assert (plain.status_code, plain.headers["location"]) == (303, f"/s/{session}?step=7")
    part = await api.client.post(path, data={"step": "9"}, headers=SWAP)
    assert part.status_code == 200
    assert "&lt;i&gt;here&lt;/i&gt;" in part.text
    assert [int(step) for step in re.findall(r'data-step="(\d+)"', part.text)] == [7, 9]
    found = re.search(r'action="(/s/[^"]+/delete)"', part.text)
    assert found is not None
    left = await api.client.post(found.group(1), headers=SWAP)
    assert [int(step) for step in re.findall(r'data-step="(\d+)"', left.text)] == [9]
    outside = await api.client.post(path, data={"step": "123456"}, headers=HTML)
    assert outside.status_code == 404
    assert "has steps 1 to" in outside.text


async def test_older_sessions_are_on_further_pages(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with served_api(engine, data_dir=tmp_path / "many") as api:
        await api.plugin.writer.settle()
        with sqlite3.connect(tmp_path / "many" / DATABASE_FILE) as file:
            for number in range(70):
                values = session_values(
                    f"s{number}", number + 1, ended_ns=number + 2, ended_how="interrupted", num_lost_steps=0
                )
                names, marks = ", ".join(values), ", ".join("?" * len(values))
                file.execute(f"INSERT INTO sessions ({names}) VALUES ({marks})", [*values.values()])  # noqa: S608
        first = await get_text(api, "/sessions")
        assert len(re.findall(r'<tr id="session-', first)) == 50
        older = re.search(r'rel="next" href="([^"]+)"', first)
        assert older is not None
        second = await get_text(api, html.unescape(older.group(1)))
        assert len(re.findall(r'<tr id="session-', second)) == 21
        assert 'rel="next"' not in second
        assert "Newest sessions" in second
        assert "There are no older sessions" in await get_text(api, "/sessions?before=1.s0")


async def test_when_the_history_cannot_be_read_the_list_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Database) -> NoReturn:
        raise HistoryUnavailableError("The file is <damaged>.")

    async with running_api() as api:
        monkeypatch.setattr(Database, "read", refuse)
        response = await api.client.get("/sessions", headers=HTML)
        assert response.status_code == 503
        assert "<b>The history cannot be read.</b> The file is &lt;damaged&gt;." in response.text
        assert 'href="/live"' in response.text
        response = await api.client.get("/s/any", headers=HTML)
        assert response.status_code == 503
        assert "The file is &lt;damaged&gt;." in response.text


async def test_forms_that_cannot_be_read_are_the_clients_error(recorded: tuple[ServedApi, str]) -> None:
    api, session = recorded
    body = b'--x\r\nContent-Disposition: form-data; name="note"\r\n\r\n\xff\xfe\r\n--x--\r\n'
    for path in ("note", "star", "bookmarks"):
        response = await api.client.post(
            f"/s/{session}/{path}",
            content=body,
            headers={"content-type": "multipart/form-data; boundary=x", **HTML},
        )
        assert response.status_code == 400
        assert "The form is not readable" in response.text
