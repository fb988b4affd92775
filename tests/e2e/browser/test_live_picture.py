"""The block grid of a real server with the real model, block by block."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from playwright.async_api import Page, WebSocketRoute, expect

from app.model_store import DEFAULT_MODEL
from tests.e2e.browser.conftest import Watcher
from tests.e2e.browser.picture import USUAL_STATES, compare_at_rest, compare_while_running, wait_for
from tests.support.server import ServerProcess

pytestmark = pytest.mark.browser

PREFIX = "You are the keeper of a lighthouse and you answer letters from ships. " * 3


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(
        "--num-blocks", "256", "--max-num-seqs", "7", "--max-num-batched-tokens", "128", is_forked=True
    ) as running:
        yield running


async def chat(client: httpx.AsyncClient, question: str, max_tokens: int) -> None:
    body: dict[str, Any] = {
        "model": DEFAULT_MODEL,
        "messages": [{"role": "user", "content": PREFIX + question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text


@asynccontextmanager
async def traffic(url: str, *, num_chats: int = 3, max_tokens: int = 16) -> AsyncIterator[None]:
    """Keep several chats with a common beginning going; the open ones end with the block."""

    async def keep_chatting(client: httpx.AsyncClient, number: int) -> None:
        turn = 0
        while True:
            await chat(client, f"Letter {number}.{turn}: what do you see tonight?", max_tokens + 5 * number)
            turn += 1

    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        tasks = [asyncio.create_task(keep_chatting(client, number)) for number in range(num_chats)]
        try:
            yield
        finally:
            failures = [task.exception() for task in tasks if task.done()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert failures == []


async def open_live(watcher: Watcher, url: str, **options: Any) -> Page:
    page = await watcher.open_page(**options)
    await page.goto(f"{url}/live")
    await expect(page.locator("#connection-text")).to_have_text("live")
    return page


@pytest.mark.parametrize(
    ("mode", "viewport"),
    [
        ("state", {"width": 1440, "height": 900}),
        ("request", {"width": 1280, "height": 800}),
        ("state", {"width": 360, "height": 740}),
    ],
)
async def test_every_block_has_the_colour_of_its_state(
    server: ServerProcess, watcher: Watcher, mode: str, viewport: dict[str, int]
) -> None:
    page = await open_live(watcher, server.url, viewport=viewport, reduced_motion="reduce")
    await page.locator(f"[data-mode={mode}]").click()
    async with traffic(server.url):
        await compare_while_running(page, server.url, mode, until=USUAL_STATES)
    await compare_at_rest(page, server.url, mode)


async def test_after_a_dropped_socket_the_picture_is_the_engine_s(
    server: ServerProcess, watcher: Watcher
) -> None:
    page = await watcher.open_page(viewport={"width": 1280, "height": 800}, reduced_motion="reduce")
    sockets: list[WebSocketRoute] = []

    async def pass_on(route: WebSocketRoute) -> None:
        route.connect_to_server()
        sockets.append(route)

    await page.route_web_socket("**/ws/engine*", pass_on)
    await page.goto(f"{server.url}/live")
    await expect(page.locator("#connection-text")).to_have_text("live")
    async with traffic(server.url):
        await compare_while_running(page, server.url, "request", until={"active"})
        await sockets[0].close(code=4000, reason="test")
        await expect(page.locator("body")).to_have_attribute("data-connection", "down")
        await expect(page.locator("#banner")).to_contain_text("Disconnected")
        await expect(page.locator("#connection-text")).to_have_text("live")
        await expect(page.locator("#banner")).to_be_hidden()
    assert len(sockets) >= 2
    assert "from=" in sockets[-1].url
    await compare_at_rest(page, server.url)
    gaps = await page.evaluate("window.pageglass.view.gaps.length")
    rows = await page.evaluate("window.pageglass.view.steps.lastStep")
    assert gaps == 0
    assert rows == await page.evaluate("window.pageglass.paintedStep")


async def test_after_a_slow_spell_the_picture_is_the_engine_s(
    server: ServerProcess, watcher: Watcher
) -> None:
    page = await open_live(
        watcher, server.url, viewport={"width": 1280, "height": 800}, reduced_motion="reduce"
    )
    async with traffic(server.url):
        for _ in range(2):
            before = await page.evaluate("window.pageglass.paintedStep")
            started = time.monotonic()
            await page.evaluate(
                "() => { const end = performance.now() + 2000; while (performance.now() < end); }"
            )
            assert time.monotonic() - started >= 2
            await wait_for(page, f"window.pageglass.paintedStep > {before}")
        await compare_while_running(page, server.url, "request", until={"active"})
    await compare_at_rest(page, server.url)
