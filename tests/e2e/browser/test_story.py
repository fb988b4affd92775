"""All that people come for, with the real model and a real server: chat, look back, restart, look again."""

import asyncio
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.async_api import Page, expect

from tests.e2e.browser.conftest import Watcher
from tests.e2e.browser.picture import compare, read_picture, wait_for
from tests.support.server import ServerProcess

pytestmark = pytest.mark.browser

DESK = {"width": 1440, "height": 900}
SIZES = ("--num-blocks", "16", "--max-num-seqs", "4")
STREAMED = "(document.querySelector('.stream-text')?.textContent ?? '').length"


async def read_recorded(server: ServerProcess, session: str, step: int) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=server.url) as client:
        response = await client.get(f"/api/sessions/{session}/state", params={"step": step})
    response.raise_for_status()
    state: dict[str, Any] = response.json()
    return state


async def read_last_step(server: ServerProcess, session: str) -> int:
    """Return the last step once the engine rests: what is still on its way to the history is included."""
    async with httpx.AsyncClient(base_url=server.url) as client:
        live = (await client.get("/api/engine/state", params={"blocks": 0})).json()
        while True:
            recorded: int = (await client.get(f"/api/sessions/{session}")).json()["last_step"]
            if live["session"] != session or recorded == live["step"]:
                return recorded
            await asyncio.sleep(0.05)


async def send(page: Page, text: str) -> None:
    await page.locator("#text").fill(text)
    await page.locator("#text").press("Enter")


async def chat(page: Page) -> None:
    """One answer left in the middle by a reload, which it does not notice, and one that is stopped."""
    await page.locator("#max_tokens").fill("64")
    await page.locator("#temperature").fill("0")
    await send(page, "Tell me a long story of a lighthouse.")
    await page.wait_for_url(re.compile(r"/chat/[0-9a-f]{32}$"))
    await wait_for(page, f"{STREAMED} > 40")
    await page.reload()
    await expect(page.locator(".answer.is-complete")).to_have_count(1, timeout=120_000)
    await expect(page.locator(".figures")).to_contain_text("64 tokens")
    await send(page, "And what happened then?")
    await wait_for(page, f"{STREAMED} > 10")
    await page.keyboard.press("Escape")
    await expect(page.locator(".answer.is-stopped")).to_have_count(1)


async def send_more_than_fits(server: ServerProcess) -> None:
    """Requests with a common beginning, for whom there are too few blocks."""
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        prompts = [f"{'A lighthouse stands on the rock. ' * 12} {number}" for number in range(6)]
        bodies = [
            {"model": "smollm2-135m-instruct", "prompt": prompt, "max_tokens": 40, "ignore_eos": True}
            for prompt in prompts
        ]
        responses = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
    assert [response.status_code for response in responses] == [200] * 6


async def check_steps(page: Page, server: ServerProcess, session: str, seed: int) -> set[str]:
    """Go to steps all over the session; return the block states that were seen."""
    last = await read_last_step(server, session)
    await page.locator("#replay").focus()
    await page.keyboard.press("End")
    await wait_for(page, f"window.pageglass.paintedStep >= {last}")
    seen: set[str] = set()
    for step in (*random.Random(seed).sample(range(1, last), 8), last):
        await page.locator("#replay-goto").fill(str(step))
        await page.locator("#replay-goto").press("Enter")
        await wait_for(page, f"window.pageglass.paintedStep === {step}")
        picture = await read_picture(page)
        assert picture is not None
        seen |= compare(picture, await read_recorded(server, session, step), "request")
    return seen


async def check_tables(page: Page, server: ServerProcess, session: str, step: int) -> None:
    """Without scripts: the counts of the page are those of the recorded state."""
    await page.goto(f"{server.url}/s/{session}?step={step}")
    rows = page.locator("noscript table.facts, table.facts").first.locator("tbody tr")
    shown = {
        await row.locator("th").inner_text(): int(
            (await row.locator("td").first.inner_text()).replace(",", "")
        )
        for row in await rows.all()
    }
    state = await read_recorded(server, session, step)
    assert Counter(shown) == Counter(block["state"] for block in state["blocks"])


async def test_what_was_said_can_be_looked_at_again_also_after_a_restart(
    watcher: Watcher, tmp_path: Path
) -> None:
    data_dir = tmp_path / "data"
    with ServerProcess(*SIZES, data_dir=data_dir, is_forked=True) as server:
        page = await watcher.open_page(viewport=DESK, reduced_motion="reduce")
        await page.goto(f"{server.url}/chat")
        await chat(page)
        await send_more_than_fits(server)
        await page.get_by_role("link", name="Show in grid").last.click()
        await page.wait_for_url(re.compile(r"/s/[0-9a-f]{32}\?.*step=\d+"))
        session = page.url.partition("/s/")[2].partition("?")[0]
        step = int(re.findall(r"step=(\d+)", page.url)[0])
        await wait_for(page, f"window.pageglass?.paintedStep === {step}")
        await page.goto(f"{server.url}/s/{session}")  # without a request that is lit up
        await wait_for(page, "window.pageglass?.paintedStep >= 0")
        seen = await check_steps(page, server, session, seed=1)
        assert {"active", "tail", "cached", "shared"} <= seen
        totals = (await read_recorded(server, session, await read_last_step(server, session)))["totals"]
        assert min(totals["num_preemptions"], totals["num_hit_tokens"], totals["num_evictions"]) > 0
        await page.close()
    with ServerProcess(*SIZES, data_dir=data_dir, is_forked=True) as server:
        page = await watcher.open_page(viewport=DESK, reduced_motion="reduce")
        await page.goto(f"{server.url}/sessions")
        await page.locator(f"a[href*='/s/{session}']").first.click()
        await wait_for(page, "window.pageglass?.paintedStep >= 0")
        await check_steps(page, server, session, seed=2)
        await page.close()
        bare = await watcher.open_page(viewport=DESK, java_script_enabled=False)
        await check_tables(bare, server, session, 20)
        await bare.goto(f"{server.url}/chat")
        await bare.get_by_role("link", name=re.compile("lighthouse")).first.click()
        await expect(bare.locator(".answer")).to_have_count(2)
