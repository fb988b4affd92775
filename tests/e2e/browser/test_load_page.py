"""The load page in a browser: start, progress, stop; and the switch for texts."""

import pytest
from playwright.async_api import expect

from tests.e2e.browser.conftest import Watcher
from tests.support.api import ServedApi, served_api, until
from tests.support.fake_engine import FakeEngine

pytestmark = pytest.mark.browser

PHONE = {"width": 320, "height": 700}


def slow_engine() -> FakeEngine:
    engine = FakeEngine(max_model_len=512, num_blocks=256)
    engine.runner.step_s = 0.02
    return engine


def keeps_text(api: ServedApi) -> bool:
    return api.plugin.recorder.text.is_on


async def test_a_run_is_started_followed_and_stopped(watcher: Watcher) -> None:
    async with served_api(slow_engine()) as api:
        page = await watcher.open_page(viewport={"width": 1280, "height": 900})
        await page.goto(f"{api.url}/load")
        await page.get_by_label("Equal requests").check()
        await expect(page.get_by_label("Longest answer")).to_be_hidden()
        await page.get_by_label("Requests or conversations").fill("400")
        await page.get_by_label("Requests a second").fill("0")
        await page.get_by_label("At once").fill("4")
        await page.get_by_role("button", name="Start").click()

        run = page.locator("#load-run")
        await expect(run.locator("[data-state=running]")).to_be_visible()
        await until(lambda: (view := api.plugin.loads.describe()) is not None and view.num_tokens > 20)
        tokens = run.locator("div", has_text="output tokens").locator("dd").last
        await expect(tokens).not_to_have_text("0")
        await run.get_by_role("button", name="Stop").click()
        await expect(run.locator("[data-state=stopped]")).to_be_visible()
        await expect(run.get_by_role("button", name="Stop")).to_have_count(0)
        await expect(run).to_contain_text("Stopped by hand.")
        assert not api.plugin.loads.is_active

        await page.reload()
        await expect(run.locator("[data-state=stopped]")).to_be_visible()
        await expect(page.get_by_role("radio", name="Equal requests")).to_be_checked()


async def test_without_scripts_a_run_is_started_and_stopped(watcher: Watcher) -> None:
    async with served_api(slow_engine()) as api:
        page = await watcher.open_page(viewport=PHONE, java_script_enabled=False)
        await page.goto(f"{api.url}/load")
        await page.get_by_label("Equal requests").check()
        await page.get_by_label("At once").fill("2")
        await page.get_by_role("button", name="Start").click()
        await expect(page.locator("#load-run [data-state=running]")).to_be_visible()
        assert await page.locator("noscript meta[http-equiv=refresh]").count() == 1
        await page.get_by_role("button", name="Stop").click()
        await until(lambda: not api.plugin.loads.is_active)
        await page.goto(f"{api.url}/load")
        await expect(page.locator("#load-run [data-state=stopped]")).to_be_visible()


@pytest.mark.parametrize("has_scripts", [True, False])
async def test_texts_are_switched_off_and_on_on_a_phone(watcher: Watcher, has_scripts: bool) -> None:
    async with served_api(FakeEngine()) as api:
        page = await watcher.open_page(viewport=PHONE, java_script_enabled=has_scripts)
        await page.goto(f"{api.url}/load")
        switch, note = page.get_by_role("switch", name="Keep texts"), page.locator("#recording")
        await expect(switch).to_have_attribute("aria-checked", "true")
        await expect(note).to_be_hidden()

        await switch.click()
        await expect(switch).to_have_attribute("aria-checked", "false")
        await expect(note).to_contain_text("Texts are not kept")
        assert not keeps_text(api)
        assert page.url == f"{api.url}/load"

        await switch.click()
        await expect(switch).to_have_attribute("aria-checked", "true")
        await expect(note).to_be_hidden()
        assert keeps_text(api)

        for name in ("Azure chat traffic", "Equal requests", "A file of yours"):
            await page.get_by_role("radio", name=name).check()
            assert await page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
