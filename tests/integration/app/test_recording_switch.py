"""The line that says what is not recorded, and the switch for texts, on every page."""

import pytest

from app.db.faults import FileFaultError
from tests.support.api import running_api, until
from tests.support.history import fetch

HTML = {"accept": "text/html"}
KEPT = "Prompts, answers and token ids are kept"
NOT_KEPT = "Texts are not kept"


async def test_pages_show_whether_texts_are_kept_and_let_people_switch() -> None:
    async with running_api() as api:
        page = (await api.client.get("/live", headers=HTML)).text
        assert KEPT in page
        assert NOT_KEPT not in page

        answer = await api.client.post(
            "/recording/text", data={"text": "off", "back": "/live"}, headers={"hx-request": "true"}
        )
        assert answer.status_code == 200
        assert NOT_KEPT in answer.text
        assert 'aria-checked="false"' in answer.text
        assert not api.plugin.recorder.text.is_on
        assert NOT_KEPT in (await api.client.get("/live", headers=HTML)).text
        assert NOT_KEPT in (await api.client.get("/recording")).text

        await api.client.post("/recording/text", data={"text": "on"}, headers={"hx-request": "true"})
        assert NOT_KEPT not in (await api.client.get("/live", headers=HTML)).text


async def test_a_session_that_lacked_texts_once_says_so() -> None:
    async with running_api() as api:
        for text in ("off", "on"):
            await api.client.post("/recording/text", data={"text": text})
        await api.plugin.writer.settle()

        assert fetch(api.plugin.database.path, "SELECT records_text FROM sessions") == [(0,)]


@pytest.mark.parametrize(
    ("back", "location"),
    [
        ("/live", "/live"),
        ("/requests?q=a", "/requests?q=a"),
        ("//evil.example/", "/live"),
        ("/\\evil.example/", "/live"),
        ("https://evil.example/", "/live"),
        ("/live\r\nset-cookie: a=b", "/live"),
        ("", "/live"),
    ],
)
async def test_a_form_without_scripts_leads_back_to_this_server_only(back: str, location: str) -> None:
    async with running_api() as api:
        answer = await api.client.post(
            "/recording/text", data={"text": "off", "back": back}, follow_redirects=False
        )
        assert (answer.status_code, answer.headers["location"]) == (303, location)


async def test_a_page_leads_back_to_itself() -> None:
    async with running_api() as api:
        page = (await api.client.get("/live?a=%22b", headers=HTML)).text
        assert '<input type="hidden" name="back" value="/live?a=%22b">' in page


async def test_what_is_neither_on_nor_off_is_an_error_that_names_the_field() -> None:
    async with running_api() as api:
        for form in ({}, {"text": "maybe"}):
            answer = await api.client.post("/recording/text", data=form)
            assert answer.status_code == 400
            assert answer.json()["param"] == "text"
        assert api.plugin.recorder.text.is_on


async def test_another_site_cannot_switch() -> None:
    async with running_api() as api:
        answer = await api.client.post(
            "/recording/text", data={"text": "off"}, headers={"origin": "http://evil.example"}
        )
        assert answer.status_code == 403


async def test_pages_say_what_is_not_recorded_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(_: object) -> None:
        raise FileFaultError("The file is damaged.", is_final=True)

    monkeypatch.setattr("app.db.database.upgrade", refuse)
    async with running_api() as api:
        await until(lambda: api.plugin.writer.status.state == "off")
        page = (await api.client.get("/live", headers=HTML)).text
        assert "<b>Not recorded:</b> The file is damaged." in page
        assert (await api.chat()).status_code == 200


async def test_losses_stay_on_the_page() -> None:
    async with running_api() as api:
        api.plugin.writer._num_lost_steps = 1234
        page = (await api.client.get("/live", headers=HTML)).text
        assert "1,234 steps and 0 rows" in page
