"""The list of requests and its charts in a real browser: filtering, drawing, both themes, narrow screens."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Page, expect

from app.history.metric_log import MetricLog
from app.web import chart_context
from tests.e2e.browser.conftest import Watcher
from tests.support.api import ServedApi, served_api, until
from tests.support.fake_engine import FakeEngine

pytestmark = pytest.mark.browser

PAYLOAD = "<img src=x onerror=document.title=1>"


@pytest_asyncio.fixture(loop_scope="session")
async def api() -> AsyncIterator[ServedApi]:
    async with served_api(FakeEngine(num_blocks=48, max_model_len=128)) as served:
        await until(lambda: served.plugin.database.is_open)
        yield served


async def complete(api: ServedApi, prompt: str, **fields: Any) -> str:
    body = {"model": "fake", "prompt": prompt, "max_tokens": 8, **fields}
    request_id: str = (await api.client.post("/v1/completions", json=body)).json()["id"]
    return request_id


async def settle(api: ServedApi) -> None:
    (log,) = [part for part in api.plugin.recorder._parts if isinstance(part, MetricLog)]
    await until(lambda: log._sums is None)
    await api.plugin.writer.settle()


async def test_the_list_filters_as_one_types_and_the_address_follows(
    api: ServedApi, watcher: Watcher
) -> None:
    wanted = await complete(api, f"lighthouse {PAYLOAD}")
    for number in range(3):
        await complete(api, f"number {number}")
    await settle(api)
    page = await watcher.open_page(viewport={"width": 1280, "height": 900})
    await page.goto(f"{api.url}/requests")
    rows = page.locator("#request-list tbody tr")
    await expect(rows).to_have_count(4)

    await page.get_by_label("Id or text").fill("lighthouse")
    await expect(rows).to_have_count(1)
    await expect(page).to_have_url(f"{api.url}/requests?q=lighthouse")
    await page.get_by_label("Since, UTC").fill("soon")
    await expect(page.get_by_role("alert")).to_contain_text("'soon' is no date and time")
    await page.get_by_label("Since, UTC").fill("")
    await expect(rows).to_have_count(1)
    await page.get_by_label("Id or text").fill("")
    await expect(rows).to_have_count(4)

    await complete(api, "comes while the page is open")
    await expect(rows).to_have_count(5)

    await page.locator(f"#row-{wanted} th a").click()
    await expect(page.get_by_role("heading", level=1)).to_contain_text("finished")
    await expect(page.locator("pre.text").first).to_have_text(f"lighthouse {PAYLOAD}")
    assert "Request" in await page.title()


async def test_charts_are_drawn_in_utc_in_both_themes_and_lead_to_a_step(
    api: ServedApi, watcher: Watcher
) -> None:
    await asyncio.gather(*(complete(api, f"{number} prompt", max_tokens=60) for number in range(4)))
    await settle(api)
    page = await watcher.open_page(viewport={"width": 320, "height": 800}, timezone_id="America/New_York")
    await page.goto(f"{api.url}/requests")
    path = f"/api/sessions/{api.plugin.hub.session_id}/metrics"
    await until_complete(page, path)
    await page.reload()
    await expect(page.locator(".chart canvas")).to_have_count(4)
    await expect(page.locator("#chart-table")).to_be_attached()
    await page.locator("#chart-table summary").click()
    count = await page.locator("#chart-table tbody tr").count()
    await complete(api, "one more second")
    await settle(api)
    await until_complete(page, path, count + 1)
    await page.evaluate("document.getElementById('charts').dispatchEvent(new CustomEvent('charts:tick'))")
    await expect(page.locator("#chart-table tbody tr")).to_have_count(count + 1)
    await expect(page.locator("#chart-table")).to_have_attribute("open", "")
    assert await page.evaluate("document.documentElement.scrollWidth") <= 320
    await page.get_by_role("button", name="Theme").click()
    await expect(page.locator("html")).to_have_attribute("data-theme", "light")
    await expect(page.locator(".chart canvas")).to_have_count(4)

    columns = await page.evaluate(COLUMNS)
    assert columns["times"] == [100, 101, 104, 105]
    assert columns["decode"] == [5, 0, 0, 7]
    assert columns["running"] == [7, 2, 2, 8], "the most of a span; counts stay while nothing runs"
    assert columns["axis"] == [46, 46, 63.5], "numbers of any length are seen whole"
    assert columns["TTFT"] == [9, None, None, None]


COLUMNS = """async () => {
  const script = [...document.scripts].find(({ src }) => src.endsWith("js/requests.js")).src;
  const { axisWidth, toColumns } = await import(new URL("charts.js", script).href);
  const item = (unix, decode, running, ttft, complete = true) => ({
    unix, is_complete: complete, last_step: unix, prefill_tokens_per_s: 0, decode_tokens_per_s: decode,
    num_running: running, num_waiting: 0, max_running: running + 5, max_waiting: 0,
    num_free: 1, num_cached: 0, num_used: 0, ttft_avg_ms: ttft,
  });
  const { times, columns } = toColumns({
    width_s: 1, items: [item(100, 5, 2, 9), item(105, 7, 3, null), item(106, 9, 9, 9, false)],
  });
  const axis = [axisWidth(null), axisWidth(["0", "500"]), axisWidth(["5,000", "100,000"])];
  return { times, axis, ...Object.fromEntries(columns) };
}"""


async def until_complete(page: Page, path: str, num: int = 1) -> None:
    """Wait until so many seconds of the run are complete for the charts."""
    expression = (
        f"async () => (await (await fetch('{path}')).json()).items"
        f".filter((item) => item.is_complete).length >= {num}"
    )
    async with asyncio.timeout(15):
        while not await page.evaluate(expression):
            await asyncio.sleep(0.1)


async def test_without_scripts_the_list_its_filter_and_the_numbers_are_there(
    api: ServedApi, watcher: Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chart_context, "SETTLING_S", -1.0)  # the second that is on is complete, too
    await complete(api, "lighthouse")
    await complete(api, "number one")
    await settle(api)
    page = await watcher.open_page(java_script_enabled=False)
    await page.goto(f"{api.url}/requests")
    await page.get_by_label("Id or text").fill("lighthouse")
    await page.get_by_role("button", name="Filter").click()
    await expect(page.locator("#request-list tbody tr")).to_have_count(1)
    await page.get_by_text("The same as a table").click()
    await expect(page.get_by_role("columnheader", name="Decode tok/s")).to_be_visible()
    await page.locator("#request-list tbody th a").click()
    await expect(page.get_by_role("heading", name="Life")).to_be_visible()


async def test_blocks_stay_unfolded_while_the_request_goes_on(api: ServedApi, watcher: Watcher) -> None:
    api.engine.runner.step_s = 0.05
    task = asyncio.create_task(complete(api, "wait", max_tokens=100, seed=2**53 - 1))
    hub = api.plugin.hub
    await until(lambda: hub.snapshot is not None and bool(hub.snapshot.running))
    assert hub.snapshot is not None
    (view,) = hub.snapshot.running
    await api.plugin.writer.settle()
    page = await watcher.open_page(viewport={"width": 320, "height": 800})
    await page.goto(f"{api.url}/r/{view.request_id}")
    blocks = page.locator("#block-changes")
    await blocks.locator("summary").click()
    before = await page.locator("dd", has_text="of at most").inner_text()
    await expect(page.locator("dd", has_text="of at most")).not_to_have_text(before)
    await expect(blocks).to_have_attribute("open", "")
    seed = page.locator("dd.param", has_text=str(2**53 - 1))
    assert await seed.evaluate("(dd) => dd.scrollWidth <= dd.clientWidth && dd.clientHeight < 30")
    assert await page.evaluate("document.documentElement.scrollWidth") <= 320
    api.engine.runner.step_s = 0
    await task
