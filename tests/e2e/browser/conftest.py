"""A real browser, and what it must never do."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest
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


@pytest.fixture
async def watcher() -> AsyncIterator[Watcher]:
    """Yield a browser; afterwards its console must be clean and nothing may have left the host."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=find_chromium(), args=list(ARGUMENTS))
        watching = Watcher(browser)
        yield watching
        for context in watching.contexts:
            await context.close()
        await browser.close()
    assert watching.problems == []
    assert {host.rpartition(":")[0] for host in watching.hosts} <= {"127.0.0.1"}
