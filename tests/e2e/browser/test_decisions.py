"""The decision drawer over a real server that swaps, live and replayed: whom it preempted, and from whom."""

import asyncio
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import Page, expect

from tests.e2e.browser.conftest import Watcher
from tests.e2e.browser.picture import POLL_S, TIMEOUT_S, wait_for
from tests.support.recorded import read_preemptions
from tests.support.server import ServerProcess
from tests.support.tiny_server import ask, served_model, tiny_server, write_tiny_model

pytestmark = pytest.mark.browser

DESK = {"width": 1440, "height": 900}
PHONE = {"width": 360, "height": 740}
MEASURE = """() => {
  const drawer = document.querySelector("#drawer"), box = drawer.getBoundingClientRect();
  const style = getComputedStyle(drawer);
  const width = drawer.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
  const tables = [...drawer.querySelectorAll(".table-scroll")];
  return {
    fills: drawer.querySelector(".decisions").getBoundingClientRect().width > width - 0.5,
    cut: [drawer, ...tables].filter((part) => part.scrollWidth > part.clientWidth).length,
    right: box.right, bottom: box.bottom,
  };
}"""
OPTIONS = ("--swap-memory", "1MiB", "--preemption", "smallest-residual", "--preemption-mode", "swap")


@pytest_asyncio.fixture(loop_scope="session")
async def folders(tmp_path: Path) -> AsyncIterator[tuple[Path, Path]]:
    yield write_tiny_model(tmp_path / "model"), tmp_path / "data"


async def make_preemptions(client: httpx.AsyncClient, num: int) -> dict[str, Any]:
    """Send requests until so many were preempted, and wait for all answers; return the engine's state."""
    model, rng = await served_model(client), random.Random(1)
    async with asyncio.timeout(TIMEOUT_S):
        while (state := await read_state(client))["totals"]["num_preemptions"] < num:
            await asyncio.gather(*(ask(client, model, rng) for _ in range(12)))
        while (state := await read_state(client))["running"] or state["waiting"]:
            await asyncio.sleep(POLL_S)
    return state


async def read_state(client: httpx.AsyncClient) -> dict[str, Any]:
    answer: dict[str, Any] = (await client.get("/api/engine/state?blocks=0")).json()
    return answer


async def check_drawer(page: Page, preemptions: dict[int, list[dict[str, Any]]]) -> int:
    """Compare what the drawer lists with the records of its step; return the step."""
    drawer = page.locator("#drawer")
    await expect(drawer).to_be_visible()
    step = int(await drawer.locator(".decisions").get_attribute("data-step") or 0)
    events = preemptions[step]
    sections = drawer.locator("section[data-victim]")
    await expect(sections).to_have_count(len(events))
    for number, event in enumerate(events):
        section = sections.nth(number)
        rows = section.locator("table.candidates tbody tr")
        in_order = sorted(event["candidates"], key=lambda candidate: (candidate[1], -candidate[0]))
        await expect(rows).to_have_count(len(in_order))
        listed = [
            [await row.get_attribute("data-seq"), await row.locator(".score").inner_text()]
            for row in await rows.all()
        ]
        assert listed == [[str(seq_id), f"{score:,.0f}"] for seq_id, score in in_order]
        await expect(section.locator("tr.is-victim")).to_have_attribute("data-seq", str(event["seq_id"]))
        await expect(section.locator(".why-it")).to_contain_text(re.compile("score|only one"))
        await expect(section).to_contain_text("was preempted: swap")
    return step


async def check_room(page: Page, beside: str, above: str = "") -> None:
    """The drawer uses its width, cuts nothing off on a phone, and covers on a desk nothing it is about."""
    desk = await page.evaluate(MEASURE)
    assert desk["fills"]
    neighbour = await page.locator(beside).bounding_box()
    assert neighbour is not None
    assert desk["right"] <= neighbour["x"]
    if above:
        lower = await page.locator(above).bounding_box()
        assert lower is not None
        assert desk["bottom"] <= lower["y"]
    await page.set_viewport_size(PHONE)  # type: ignore[arg-type]
    phone = await page.evaluate(MEASURE)
    assert phone["fills"]
    assert phone["cut"] == 0
    await page.set_viewport_size(DESK)  # type: ignore[arg-type]


async def test_the_drawer_lists_the_candidates_live_and_replayed_after_a_restart(
    folders: tuple[Path, Path], watcher: Watcher
) -> None:
    model, data = folders
    with tiny_server(model, data, *OPTIONS) as server:
        page, session, preemptions = await _open_live(watcher, server)
        await page.keyboard.press("d")
        await check_drawer(page, preemptions)
        await expect(page.locator("#decisions-title")).to_be_focused()
        await check_room(page, beside=".side")
        await page.keyboard.press("Escape")
        await expect(page.locator("#drawer")).to_be_hidden()
        entry = page.locator("#decision-line a").first
        await entry.focus()
        await page.keyboard.press("Enter")
        step = await check_drawer(page, preemptions)
        await expect(page.locator("#drawer a[href^='/r/']").first).to_be_visible()
        await page.locator("#drawer-close").click()
        await expect(entry).to_be_focused()
        await _change_policies(page)
        await page.goto("about:blank")  # or it would look for the server that ends
    with tiny_server(model, data, *OPTIONS) as server:
        await _wait_for_history(server, session)
        await page.goto(f"{server.url}/s/{session}?step={step}")
        await wait_for(page, f"window.pageglass?.paintedStep === {step}")
        await expect(page.locator("#decision-line .k-swap")).to_have_count(len(preemptions[step]))
        await _click_newest_column(page)
        assert await check_drawer(page, preemptions) == step
        await check_room(page, beside=".side", above=".replay-panel")
        await page.locator("#drawer").get_by_role("link", name=re.compile("^Earlier preemption")).click()
        await expect(page.locator(".decisions")).not_to_have_attribute("data-step", str(step))
        assert await check_drawer(page, preemptions) < step


async def _open_live(
    watcher: Watcher, server: ServerProcess
) -> tuple[Page, str, dict[int, list[dict[str, Any]]]]:
    """Have sequences preempted before the eyes of a page; return it, the session and what is on record."""
    page = await watcher.open_page(viewport=DESK)
    await page.goto(f"{server.url}/live")
    await wait_for(page, "window.pageglass?.paintedStep >= 0")
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        state = await make_preemptions(client, 4)
        await wait_for(page, f"window.pageglass.paintedStep === {state['step']}")
        host = await page.evaluate("() => window.pageglass.view.host")
        assert host == {**state["host"], "loading": 0}
        await expect(page.locator("#stat-host-blocks")).to_contain_text(f"{host['used']} of {host['total']}")
        await expect(page.locator("#totals")).to_contain_text(f"{state['totals']['num_swaps']} swaps")
        async with asyncio.timeout(TIMEOUT_S):
            while sum(map(len, (found := await read_preemptions(client, state["session"])).values())) < 4:
                await asyncio.sleep(POLL_S)  # not yet written
    return page, state["session"], found


async def _wait_for_history(server: ServerProcess, session: str) -> None:
    async with httpx.AsyncClient(base_url=server.url) as client, asyncio.timeout(TIMEOUT_S):
        while (await client.get(f"/api/sessions/{session}")).status_code != 200:
            await asyncio.sleep(POLL_S)


async def _change_policies(page: Page) -> None:
    await page.locator("#policy-button").click()
    await page.locator("select[name=preemption]").select_option("oldest-first")
    await page.get_by_role("button", name="Use from the next step on").click()
    await expect(page.locator("#policy-dialog")).to_be_hidden()
    await expect(page.locator("#policies-now")).to_have_attribute("data-preemption", "oldest-first")


async def _click_newest_column(page: Page) -> None:
    """Click the right edge of the timeline, where the step lies that is shown."""
    box = await page.locator("#timeline").bounding_box()
    assert box is not None
    await page.locator("#timeline").click(position={"x": box["width"] - 2, "y": box["height"] - 20})
