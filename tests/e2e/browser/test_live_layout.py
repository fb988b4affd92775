"""What the live page keeps in its place, and how it takes other policies and another run of the server."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from playwright.async_api import Page, Request, expect

from tests.e2e.browser.conftest import Watcher
from tests.e2e.browser.picture import wait_for
from tests.e2e.browser.test_live_page import expect_lost_connections
from tests.support.api import ServedApi, served_api
from tests.support.fake_engine import FakeEngine

pytestmark = pytest.mark.browser

PATH = "/api/engine/policy"
LONG = {
    "#stat-step": "1,234,567",
    "#stat-step-ms": "1,234.5 ms",
    "#stat-kv-blocks": "123,456 of 123,456 blocks",
    "#stat-host-blocks": "12,345 of 12,345 blocks, 1,234 kept, 12 loading",
    "#stat-prefill": "123,456",
    ".hit-detail": "12,345,678 of 12,345,678 tokens",
    ".stat-totals dd": "1,234 finished, 1,234 preemptions, 1,234 evictions, 1,234 swaps " * 4,
    "#stat-frames": "123 steps/frame, at most 30 frames/s, 12 watching",
    "#stat-lost": "lost: 1,234 steps, 12,345 marks",
    "#stop-reason": "a running request is computing the same prefix",
    "#timeline-caption": "step 1,234 · 96 of 96 blocks · 12 + 64 tokens · 12 run, 34 wait " * 2,
}
PLACES = """() => ['#grid', '#requests', '#timeline'].map((name) => {
  const { x, y, width, height } = document.querySelector(name).getBoundingClientRect();
  return [x, y + scrollY, width, height];
})"""


@asynccontextmanager
async def served_page(
    watcher: Watcher, size: tuple[int, int] = (1400, 900), **config: Any
) -> AsyncIterator[tuple[Page, ServedApi]]:
    async with served_api(FakeEngine(num_host_blocks=16, **config)) as api:
        page = await watcher.open_page(viewport={"width": size[0], "height": size[1]})
        await page.goto(f"{api.url}/live")
        await wait_for(page, "window.pageglass?.paintedStep >= 0")
        yield page, api
        await page.close()


@pytest.mark.parametrize("size", [(1400, 900), (1100, 800), (360, 800)])
async def test_nothing_moves_whatever_the_numbers_say(watcher: Watcher, size: tuple[int, int]) -> None:
    async with served_page(watcher, size) as (page, _):
        before = await page.evaluate(PLACES)
        written = """(texts) => {
          for (const [name, text] of Object.entries(texts)) document.querySelector(name).textContent = text;
          for (const item of document.querySelectorAll('#reasons li')) item.hidden = false;
        }"""
        # In one go with the reading, or the page would have written its own numbers meanwhile.
        after = await page.evaluate(f"(texts) => {{ ({written})(texts); return ({PLACES})(); }}", LONG)
        assert after == before
        overlap = """() => document.querySelector('.legend').getBoundingClientRect().bottom
          - document.querySelector('.grid-panel').getBoundingClientRect().bottom"""
        assert await page.evaluate(overlap) <= 0
        assert before[1][3] >= 180


async def test_a_canvas_of_another_size_is_painted_in_the_same_frame(watcher: Watcher) -> None:
    async with served_page(watcher) as (page, _):
        is_painted = """() => new Promise((resolve) => {
          const canvas = document.querySelector('#grid');
          const { width } = canvas;
          const wanted = String(window.pageglass.grid.colorOf('free', -1).slice(0, 3));
          // The page's own observer was first, so it has been told when this one is.
          new ResizeObserver(() => {
            if (canvas.width !== width) resolve(String(window.pageglass.grid.pixel(0)) === wanted);
          }).observe(canvas);
          document.querySelector('.grid-area').style.marginRight = '200px';
        })"""
        assert await page.evaluate(is_painted)


@pytest.mark.parametrize("width", [360, 1400])
async def test_rows_with_priorities_keep_their_bars_and_links(watcher: Watcher, width: int) -> None:
    async with served_page(watcher, (width, 900)) as (page, api):
        api.engine.runner.step_s = 0.1
        body = api.chat_body("lighthouse", max_tokens=60, ignore_eos=True, priority=-1000)
        chat = asyncio.create_task(api.client.post("/v1/chat/completions", json=body))
        row = page.locator("#running-table tbody tr").first
        places = await row.evaluate("""(row) => ['.bar', '.urgency', '.open a'].map((name) => {
          const { width, right } = row.querySelector(name).getBoundingClientRect();
          return [width, right];
        })""")
        assert places[0][0] >= 40
        assert max(right for _, right in places) <= width
        chat.cancel()
        await asyncio.gather(chat, return_exceptions=True)


async def test_the_dialog_sends_only_what_was_changed_in_it(watcher: Watcher) -> None:
    async with served_page(watcher) as (page, api):
        sent: list[dict[str, str]] = []

        def note(request: Request) -> None:
            if request.url.endswith(PATH):
                sent.append(json.loads(request.post_data or "{}"))

        page.on("request", note)
        use = page.get_by_role("button", name="Use from the next step on")
        await page.locator("#policy-button").click()
        await use.click()
        await expect(page.locator("#policy-dialog")).to_be_hidden()
        assert sent == []

        await page.locator("#policy-button").click()
        await page.locator("select[name=preemption_mode]").select_option("swap")
        await api.client.post(PATH, json={"preemption": "oldest-first"})  # somebody else
        await expect(page.locator("select[name=preemption]")).to_have_value("oldest-first")
        await expect(page.locator("select[name=preemption_mode]")).to_have_value("swap")
        await use.click()
        await expect(page.locator("#policies-now")).to_have_attribute("data-preemption_mode", "swap")
        assert sent == [{"preemption_mode": "swap"}]
        assert (await api.client.get(PATH)).json()["preemption"] == "oldest-first"


async def test_a_refusal_is_shown_as_text_and_never_parsed(watcher: Watcher) -> None:
    async with served_page(watcher) as (page, _):
        await page.locator("#policy-button").click()
        hostile = "<img src=x onerror=alert(1)>"
        await page.locator("select[name=policy]").evaluate(
            """(select, name) => {
              select.append(new Option(name));
              select.value = name;
              select.dispatchEvent(new Event('change', { bubbles: true }));
            }""",
            hostile,
        )
        await page.get_by_role("button", name="Use from the next step on").click()
        await expect(page.locator("#policy-problem")).to_contain_text(f"policy is '{hostile}'; allowed: fcfs")
        assert all("400" in problem for problem in watcher.problems), watcher.problems
        watcher.problems.clear()


async def test_another_run_of_the_server_takes_the_page_over(watcher: Watcher) -> None:
    page = await watcher.open_page(viewport={"width": 1400, "height": 900})
    session = "window.pageglass?.view.session"
    async with served_api(FakeEngine(num_host_blocks=16)) as old:
        await page.goto(f"{old.url}/live")
        await wait_for(page, "window.pageglass?.paintedStep >= 0")
        first = await page.evaluate(f"() => {session}")
        await expect(page.locator(".replay-link")).to_have_attribute("href", f"/s/{first}")
        await old.client.post(PATH, json={"policy": "priority"})
        place = "{ target: '#drawer-body', swap: 'innerHTML' }"
        await page.evaluate(f"() => window.htmx.ajax('GET', '/live/decisions/1', {place})")
        await expect(page.locator("#drawer")).to_be_visible()
        await page.locator("#policy-button").click()
        await expect(page.locator("select[name=preemption_mode] option")).to_have_count(3)
    async with served_api(FakeEngine(), port=old.address[1]):
        await wait_for(page, f"{session} !== '{first}'")
        second = await page.evaluate(f"() => {session}")
        await expect(page.locator(".replay-link")).to_have_attribute("href", f"/s/{second}")
        await expect(page.locator("#drawer")).to_be_hidden()
        await expect(page.locator("select[name=preemption_mode] option")).to_have_count(2)
        await expect(page.locator("select[name=policy]")).to_have_value("fcfs")
        await page.close()
    expect_lost_connections(watcher)
