"""The live page around the grid: its states, its keys, and what it is without pictures or without scripts."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from playwright.async_api import Page, expect

from engine.errors import ModelError
from tests.e2e.browser.conftest import Watcher
from tests.e2e.browser.picture import NAMES, compare_at_rest, wait_for
from tests.support.api import ServedApi, served_api, until
from tests.support.fake_engine import FakeEngine

pytestmark = pytest.mark.browser

SIZES = [(320, 700), (768, 1024), (1440, 900), (2200, 1200)]
DESK = {"width": 1440, "height": 900}


def make_engine(**config: Any) -> FakeEngine:
    engine = FakeEngine(num_blocks=96, block_size=16, max_num_batched_tokens=64, max_model_len=512, **config)
    engine.runner.step_s = 0.01
    return engine


@asynccontextmanager
async def served_page(
    watcher: Watcher, engine: FakeEngine | None = None, **options: Any
) -> AsyncIterator[tuple[Page, ServedApi]]:
    async with served_api(engine or make_engine()) as api:
        page = await watcher.open_page(**{"viewport": DESK, **options})
        await page.goto(f"{api.url}/live")
        yield page, api
        await page.close()


@asynccontextmanager
async def chats(api: ServedApi, num: int = 3, max_tokens: int = 400) -> AsyncIterator[None]:
    """Hold some chats open for the length of the block."""

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        body = api.chat_body(f"{'lighthouse ' * 6}{number}", max_tokens=max_tokens, ignore_eos=True)
        await client.post("/v1/chat/completions", json=body)

    async with httpx.AsyncClient(base_url=api.url, timeout=60) as client:
        tasks = [asyncio.create_task(ask(client, number)) for number in range(num)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def evaluate(page: Page, expression: str) -> Any:
    return await page.evaluate(f"() => {expression}")


def expect_lost_connections(watcher: Watcher) -> None:
    """Forgive what a browser (and htmx) reports when the server is gone, and nothing else."""
    lost = re.compile("ERR_CONNECTION_REFUSED|Failed to fetch|ERR_EMPTY_RESPONSE|ERR_CONNECTION_RESET")
    assert [problem for problem in watcher.problems if not lost.search(problem)] == []
    watcher.problems.clear()


async def test_the_page_shows_progress_while_loading_and_then_the_engine(watcher: Watcher) -> None:
    engine = make_engine()
    engine.load_gate.clear()
    async with served_page(watcher, engine) as (page, api):
        await expect(page.get_by_role("heading", name="Loading the model")).to_be_visible()
        await expect(page.locator("#engine-state progress")).to_have_attribute("value", "25")
        await expect(page.locator("#connection-text")).to_have_text("loading the model")
        engine.load_gate.set()
        await expect(page.locator("#connection-text")).to_have_text("live")
        await expect(page.locator("#engine-state")).to_be_hidden()
        await expect(page.locator("#grid-caption")).to_have_text("96 blocks of 16 tokens, by block id")
        await expect(page.locator("#idle-hint")).to_contain_text("Idle")
        assert await compare_at_rest(page, api.url) == {"free"}


async def test_an_engine_that_failed_is_said_on_the_page(watcher: Watcher) -> None:
    engine = make_engine()
    async with served_page(watcher, engine) as (page, api):
        await expect(page.locator("#connection-text")).to_have_text("live")
        engine.runner.failures = 3
        for _ in range(3):
            await api.client.post("/v1/chat/completions", json=api.chat_body(max_tokens=4))
        await expect(page.get_by_role("alert")).to_contain_text("failed 3 times within a minute; the log")
        await expect(page.get_by_role("alert")).not_to_contain_text("injected fault")
        await expect(page.locator("#connection-text")).to_have_text("engine failed")


async def test_a_page_whose_server_ends_while_loading_stops_promising(watcher: Watcher) -> None:
    engine = make_engine()
    engine.load_error = ModelError("The model file ends too early; fetch it again.")
    engine.load_gate.clear()
    async with served_page(watcher, engine) as (page, _):
        await expect(page.locator("#engine-state progress")).to_be_visible()
        engine.load_gate.set()
        await expect(page.locator("#banner")).to_contain_text("Disconnected")
        await expect(page.locator("#engine-state progress")).to_be_hidden()
    expect_lost_connections(watcher)


async def test_when_the_server_goes_the_page_keeps_what_it_has_and_says_so(watcher: Watcher) -> None:
    page = await watcher.open_page(viewport=DESK)
    async with served_api(make_engine()) as api:
        await page.goto(f"{api.url}/live")
        async with chats(api):
            await wait_for(page, "window.pageglass.paintedStep > 5")
        await compare_at_rest(page, api.url)
        before = await evaluate(page, "[window.pageglass.paintedStep, window.pageglass.grid.pixel(0)]")
    await expect(page.locator("#banner")).to_contain_text(
        re.compile("Disconnected for .* picture is that of step")
    )
    await expect(page.locator("#connection-text")).to_have_text("disconnected")
    assert await evaluate(page, "[window.pageglass.paintedStep, window.pageglass.grid.pixel(0)]") == before
    expect_lost_connections(watcher)


async def test_requests_say_what_they_do_and_why_they_wait(watcher: Watcher) -> None:
    async with served_page(watcher, make_engine(max_num_seqs=2)) as (page, api), chats(api, num=5):
        await expect(page.locator("#running-table tbody tr")).to_have_count(2)
        await expect(page.locator("#waiting-table tbody tr")).to_have_count(3)
        await expect(page.locator("#waiting-table")).to_contain_text(re.compile(r"\d s: every slot is taken"))
        await expect(page.locator("#running-table")).to_contain_text(re.compile(r"decode \d+ tok"))
        await expect(page.locator("#stop-reason")).to_have_text("every slot is taken")
        await expect(page.locator("#stat-running")).to_have_text("2")
        await expect(page.locator("#stat-waiting")).to_have_text("3")
        await expect(page.locator("#batch-seqs")).to_have_text("2")


async def test_the_view_says_how_many_watch_and_what_was_lost(watcher: Watcher) -> None:
    async with served_page(watcher) as (page, api):
        other = await watcher.open_page(viewport=DESK)
        await other.goto(f"{api.url}/live")
        await expect(page.locator("#stat-frames")).to_have_text("2 watching", timeout=20_000)
        await other.close()
        await until(lambda: api.plugin.hub.num_clients == 1)
        await api.client.post("/v1/chat/completions", json=api.chat_body(max_tokens=4))  # sooner than idle
        await expect(page.locator("#stat-frames")).to_have_text(re.compile("^([^,]+, )?1 watching$"))
        await expect(page.locator("#stat-lost")).to_have_text("")
        await evaluate(page, "Object.assign(window.pageglass.view, { rowsLost: 12, marksLost: 1 }).step")
        await expect(page.locator("#stat-lost")).to_have_text("lost: 12 steps, 1 mark")


async def test_a_row_and_its_blocks_are_selected_together(watcher: Watcher) -> None:
    async with served_page(watcher, reduced_motion="reduce") as (page, api), chats(api):
        button = page.locator("#running-table .pick").nth(1)
        await button.click()
        await expect(button).to_have_attribute("aria-pressed", "true")
        slot = int(await page.locator("#running-table tr.is-selected").get_attribute("data-slot") or -1)
        find = f"""(() => {{
          const {{ view, grid }} = window.pageglass;
          const held = [...view.cells.keys()].filter((id) => (view.cells[id] & 15) === 2);
          const bright = (id) => grid.colorOf("active", view.cells[id] >>> 16);
          const isLit = (id) => String(grid.pixel(id)) === String(bright(id));
          const own = held.filter((id) => view.cells[id] >>> 16 === {slot});
          const others = held.filter((id) => view.cells[id] >>> 16 !== {slot});
          return own.length > 0 && others.length > 0 && own.every(isLit) && !others.some(isLit);
        }})()"""
        await wait_for(page, find)
        await page.keyboard.press("Escape")
        await expect(page.locator("#running-table tr.is-selected")).to_have_count(0)
        rect = await evaluate(page, "window.pageglass.grid.cellRect(0)")
        box = await page.locator("#grid").bounding_box()
        assert box is not None
        await page.mouse.click(
            box["x"] + rect["x"] + rect["width"] / 2, box["y"] + rect["y"] + rect["height"] / 2
        )
        await expect(page.locator("#running-table tr.is-selected")).to_have_count(1)


async def test_hovering_a_block_describes_it(watcher: Watcher) -> None:
    async with served_page(watcher) as (page, api), chats(api, num=1):
        await wait_for(page, "(window.pageglass.view.cells[0] & 15) === 2")
        rect = await evaluate(page, "window.pageglass.grid.cellRect(0)")
        box = await page.locator("#grid").bounding_box()
        assert box is not None
        await page.mouse.move(box["x"] + rect["x"] + 3, box["y"] + rect["y"] + 3)
        await expect(page.locator("#tooltip")).to_contain_text("Block 0 active")
        await expect(page.locator("#tooltip")).to_contain_text("in slot 0")


async def test_the_page_works_by_keyboard(watcher: Watcher) -> None:
    async with served_page(watcher) as (page, api), chats(api):
        await wait_for(page, "window.pageglass.paintedStep > 5")
        state_button = page.locator("[data-mode=state]")
        await page.keyboard.press("c")
        await expect(state_button).to_have_attribute("aria-pressed", "true")
        await page.keyboard.press("Control+c")
        await expect(state_button).to_have_attribute("aria-pressed", "true")
        await page.locator("#grid").focus()
        await page.keyboard.press("ArrowRight")
        await page.keyboard.press("ArrowRight")
        await expect(page.locator("#announcer")).to_contain_text("Block 2:")
        await page.keyboard.press("Home")
        await page.keyboard.press("Enter")
        await expect(page.locator("#running-table tr.is-selected")).to_have_count(1)
        await page.keyboard.press("?")
        dialog = page.locator("#keys-dialog")
        await expect(dialog).to_be_visible()
        await page.keyboard.press("c")
        await page.locator("#single-keys").uncheck()
        await page.keyboard.press("Escape")
        await expect(dialog).to_be_hidden()
        await page.keyboard.press("c")
        await expect(state_button).to_have_attribute("aria-pressed", "true")
        await page.reload()
        await wait_for(page, "window.pageglass?.paintedStep > 5")
        await page.keyboard.press("c")
        await expect(state_button).to_have_attribute("aria-pressed", "false")


async def test_the_theme_is_kept(watcher: Watcher) -> None:
    async with served_page(watcher) as (page, _):
        free = await evaluate(page, "window.pageglass.grid.colorOf('free')")
        await page.keyboard.press("t")
        await expect(page.locator("html")).to_have_attribute("data-theme", "light")
        assert await evaluate(page, "window.pageglass.grid.colorOf('free')") != free
        await page.reload()
        await expect(page.locator("html")).to_have_attribute("data-theme", "light")
        await page.goto(page.url.replace("/live", "/sessions"))
        await page.keyboard.press("t")
        await expect(page.locator("#theme-button")).to_have_text("Theme: system")
        await page.keyboard.press("t")
        await expect(page.locator("html")).to_have_attribute("data-theme", "dark")


async def test_tables_give_the_same_facts_as_the_grid(watcher: Watcher) -> None:
    async with served_page(watcher) as (page, api), chats(api):
        await page.locator("#table-button").click()
        await expect(page.locator("#tables")).to_contain_text("Blocks by state, 96 in all")
        await expect(page.locator("#tables")).to_contain_text(re.compile(r"active\s*[1-9]"))
        await page.locator("#table-button").click()
        await expect(page.locator("#tables")).to_be_hidden()


async def test_without_scripts_the_page_is_tables(watcher: Watcher) -> None:
    async with served_page(watcher) as (_, api), chats(api):
        page = await watcher.open_page(viewport=DESK, java_script_enabled=False)
        await page.goto(f"{api.url}/live")
        await expect(page.get_by_role("table", name="Blocks by state, 96 in all")).to_be_visible()
        await expect(page.locator("#running-table tbody tr")).to_have_count(3)
        await expect(page.locator("#keys-button")).to_be_hidden()


async def test_pictures_are_put_into_words(watcher: Watcher) -> None:
    async with served_page(watcher) as (page, _):
        label = re.compile("0% of 96 KV blocks in use, requests: 0 running")
        await expect(page.get_by_role("img", name=label)).to_be_visible()


@pytest.mark.parametrize("size", SIZES)
async def test_nothing_is_cut_off_sideways(watcher: Watcher, size: tuple[int, int]) -> None:
    viewport = {"width": size[0], "height": size[1]}
    async with served_page(watcher, viewport=viewport) as (page, api), chats(api, num=6):
        await expect(page.locator("#running-table tbody tr")).to_have_count(6)
        assert await evaluate(page, "document.documentElement.scrollWidth") <= size[0]
        await expect(page.locator("#running-table .unit").first).to_be_visible()
        small = """[...document.querySelectorAll('button, select, a[href]')]
          .map((e) => [e.textContent.trim(), e.getBoundingClientRect()])
          .filter(([, box]) => box.width > 1 && (box.height < 24 || box.width < 24)).map(([text]) => text)"""
        assert await evaluate(page, small) == []


async def test_with_forced_colours_blocks_are_told_apart_by_the_system_s(watcher: Watcher) -> None:
    async with served_page(watcher, forced_colors="active") as (page, _):
        await expect(page.locator("[data-mode=state]")).to_have_attribute("aria-pressed", "true")
        colors = await evaluate(
            page,
            f"{list(NAMES[:5])}.map((state) => String(window.pageglass.grid.colorOf(state)))",
        )
        assert len(set(colors)) == 5
