"""A real browser, and what it must never do.

One browser serves all tests, each in contexts of its own: nothing that a page keeps reaches the next test. A
browser lives in one event loop, so all tests and asynchronous fixtures of this folder share one.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from playwright.async_api import Browser, BrowserContext, Page, Response, async_playwright

from tests.support.browser import find_chromium

ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@dataclass
class Watcher:
    """Opens pages and writes down what went wrong in them."""

    browser: Browser
    problems: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)
    contexts: list[BrowserContext] = field(default_factory=list)

    async def open_page(self, **options: Any) -> Page:
        """Return a fresh page; `options` are those of a browser context."""
        context = await self.browser.new_context(
            viewport=options.pop("viewport", None),
            color_scheme=options.pop("color_scheme", "dark"),
            **options,
        )
        self.contexts.append(context)
        page = await context.new_page()
        page.on("console", lambda message: self._note(message.type, message.text))
        page.on("pageerror", lambda error: self._note("error", str(error)))
        page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))
        page.on("websocket", lambda socket: self.hosts.add(urlsplit(socket.url).netloc))
        page.on("response", self._check_response)
        return page

    def _check_response(self, response: Response) -> None:
        if response.status >= 400:
            self._note("error", f"{response.status} {response.url}")

    def _note(self, kind: str, text: str) -> None:
        if kind in {"error", "warning"}:
            self.problems.append(f"{kind}: {text}")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        started = await playwright.chromium.launch(executable_path=find_chromium(), args=list(ARGUMENTS))
        yield started
        await started.close()


@pytest_asyncio.fixture(loop_scope="session")
async def watcher(browser: Browser) -> AsyncIterator[Watcher]:
    """Yield what opens pages; afterwards their consoles must be clean and nothing may have left the host."""
    watching = Watcher(browser)
    yield watching
    for context in watching.contexts:
        await context.close()
    assert watching.problems == []
    assert {host.rpartition(":")[0] for host in watching.hosts} <= {"127.0.0.1"}
