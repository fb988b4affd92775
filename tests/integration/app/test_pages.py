"""Pages and their parts over a fake engine."""

import re

import pytest

from app.engine_host import StartProgress
from app.web.templating import asset_url, assets_version
from engine.errors import ModelError
from tests.support.api import Api, running_api, served_api, until
from tests.support.fake_engine import FakeEngine

HTML = {"accept": "text/html"}


async def get_text(api: Api, path: str, status: int = 200) -> str:
    response = await api.client.get(path, headers=HTML)
    assert response.status_code == status
    assert response.headers["content-type"].startswith("text/html")
    return response.text


async def test_the_root_leads_to_the_live_view() -> None:
    async with running_api() as api:
        response = await api.client.get("/", follow_redirects=False)
        assert (response.status_code, response.headers["location"]) == (302, "/live")


async def test_the_live_page_is_fresh_and_varies_by_who_asks() -> None:
    async with running_api() as api:
        for path in ("/live", "/live/panels", "/live/tables", "/live/status"):
            response = await api.client.get(path)
            assert response.headers["vary"] == "HX-Request"
            assert response.headers["cache-control"] == "no-store"
        text = await get_text(api, "/live")
        assert "64 blocks" in text
        assert "Idle" in text
        assert "http://127.0.0.1:8000/v1/chat/completions \\\n" in text


async def test_all_that_the_page_loads_exists_and_may_be_kept_for_ever() -> None:
    async with running_api() as api:
        text = await get_text(api, "/live")
        addresses = re.findall(r"(?:src|href)=\"(/static/[^\"]+)\"", text)
        assert len(addresses) >= 4
        for address in addresses:
            assert f"/static/{assets_version()}/" in address
            response = await api.client.get(address)
            assert response.status_code == 200
            assert "immutable" in response.headers["cache-control"]


async def test_modules_import_each_other_below_the_same_address() -> None:
    async with running_api() as api:
        queue, seen = [asset_url("js/live.js")], set()
        while queue:
            address = queue.pop()
            seen.add(address)
            response = await api.client.get(address)
            assert response.status_code == 200, address
            assert "javascript" in response.headers["content-type"]
            folder = address.rpartition("/")[0]
            found = {f"{folder}/{name}" for name in re.findall(r'from "\./([\w.]+)"', response.text)}
            queue += found - seen - set(queue)
        assert len(seen) > 15


async def test_the_page_answers_while_the_model_loads() -> None:
    engine = FakeEngine()
    engine.load_gate.clear()
    async with running_api(engine, wait_ready=False) as api:
        await until(lambda: api.plugin.host.progress != StartProgress())
        text = await get_text(api, "/live")
        assert "Loading the model" in text
        assert "weights · 25%" in text
        assert "every 1s" in text
        assert "The model is not loaded yet." in text
        engine.load_gate.set()
        await until(lambda: api.plugin.host.config is not None)
        card = await get_text(api, "/live/status")
        assert "Loading" not in card
        assert "every 1s" not in card


async def test_a_model_that_cannot_be_loaded_is_named_on_the_page() -> None:
    engine = FakeEngine()
    engine.load_error = ModelError("The file <ends> too early.")
    async with running_api(engine, wait_ready=False) as api:
        await until(lambda: api.plugin.host.status == "failed")
        assert "The file &lt;ends&gt; too early." in await get_text(api, "/live")


async def test_panels_and_tables_show_a_running_request() -> None:
    engine = FakeEngine()
    async with served_api(engine) as api:
        engine.runner.step_s = 0.02
        body = api.chat_body("x" * 40, max_tokens=60, ignore_eos=True, stream=True)
        async with api.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            pieces = answer.aiter_text()  # kept: an iterator that is dropped closes the answer
            await anext(pieces)
            await until(lambda: bool(api.plugin.hub.snapshot and api.plugin.hub.snapshot.running))
            panels = (await api.client.get("/live/panels")).text
            tables = (await api.client.get("/live/tables")).text
        assert 'data-slot="0"' in panels
        assert "<hx-partial" in panels
        assert 'id="engine-step"' in panels
        assert re.search(r"<th scope=\"row\">tail</th><td class=\"num\">\d", tables)


@pytest.mark.parametrize(
    ("cookie", "theme"), [("light", "light"), ("dark", "dark"), ("system", "system"), ('"><b>', "dark")]
)
async def test_the_theme_comes_from_the_cookie_if_it_is_one(cookie: str, theme: str) -> None:
    async with running_api() as api:
        response = await api.client.get("/live", headers={"cookie": f"pageglass_theme={cookie}"})
        assert f'data-theme="{theme}"' in response.text


async def test_people_get_a_page_for_an_unknown_address() -> None:
    async with running_api() as api:
        text = await get_text(api, "/nowhere", 404)
        assert "There is no such page" in text
        assert 'href="/live"' in text
        assert 'href="/sessions"' in text
