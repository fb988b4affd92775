"""The playground in a real browser: with the real model, and its details over a fake engine."""

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from playwright.async_api import Page, expect

from tests.e2e.browser.conftest import Watcher
from tests.e2e.browser.picture import wait_for
from tests.support.api import ServedApi, served_api
from tests.support.fake_engine import FakeEngine
from tests.support.server import ServerProcess

pytestmark = pytest.mark.browser

DESK = {"width": 1440, "height": 900}
QUESTION = "Tell me a long story of a lighthouse."
TEXT_OF_ANSWER = "document.querySelector('.stream-text')?.textContent ?? ''"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--num-blocks", "256", "--max-num-seqs", "4", is_forked=True) as running:
        yield running


@asynccontextmanager
async def fake_chat(watcher: Watcher, **options: object) -> AsyncIterator[tuple[Page, ServedApi]]:
    engine = FakeEngine(num_blocks=96, block_size=8, max_model_len=512)
    async with served_api(engine) as api:
        engine.runner.step_s = 0.01
        page = await watcher.open_page(**{"viewport": DESK, **options})
        await page.goto(f"{api.url}/chat")
        yield page, api
        await page.close()


async def send(page: Page, text: str) -> None:
    await page.locator("#text").fill(text)
    await page.locator("#text").press("Enter")


async def test_chat_reload_in_mid_answer_stop_and_regenerate(server: ServerProcess, watcher: Watcher) -> None:
    page = await watcher.open_page(viewport=DESK)
    await page.goto(f"{server.url}/chat")
    await page.locator("#max_tokens").fill("200")
    await page.locator("#temperature").fill("0")
    await expect(page.locator("#params-changed b")).to_have_text("2")
    await send(page, QUESTION)

    # It streams; the page is left in the middle and comes back; the text is whole, once.
    await expect(page).to_have_url(re.compile(r"/chat/[0-9a-f]{32}$"))
    await wait_for(page, f"({TEXT_OF_ANSWER}).length > 60")
    await wait_for(page, "window.pageglass.litSlot === 0")
    before = await page.evaluate(TEXT_OF_ANSWER)
    await page.reload()
    after = await page.evaluate(TEXT_OF_ANSWER)
    assert after.startswith(before)
    await wait_for(page, f"({TEXT_OF_ANSWER}).length > {len(after) + 40}")
    late = await page.evaluate(TEXT_OF_ANSWER)
    assert late.startswith(after)
    finished = page.locator(".answer.is-complete")
    await expect(finished).to_have_count(1, timeout=120_000)
    whole = await page.locator(".copy-answer").get_attribute("data-text")
    assert whole is not None
    assert whole.startswith(late)  # what came in two pieces is what the server has: nothing twice, no hole
    await expect(page.locator(".figures")).to_contain_text("200 tokens")
    await wait_for(page, "window.pageglass.litSlot === -1")

    # The same question again, at temperature 0: the same text.
    await page.locator("#max_tokens").fill("30")
    await page.get_by_role("button", name="Regenerate").click()
    await expect(page.locator(".variants")).to_contain_text("2/2", timeout=120_000)
    await expect(finished).to_have_count(1, timeout=120_000)
    again = await page.locator(".copy-answer").get_attribute("data-text")
    assert again
    assert whole.startswith(again)
    assert int(await page.locator(".prompt-bar b").first.inner_text()) > 0  # its prompt was in the cache

    # A second question, stopped with Escape; what there is stays.
    await page.locator("#max_tokens").fill("400")
    await send(page, "And what happened then?")
    await expect(page.locator("#text")).to_have_value("")
    await wait_for(page, f"({TEXT_OF_ANSWER}).length > 20")
    await page.keyboard.press("Escape")
    await expect(page.locator(".answer.is-stopped")).to_contain_text("stopped by you")
    assert await page.locator(".turn").count() == 2


async def test_with_scripts_blocked_the_chat_is_forms(server: ServerProcess, watcher: Watcher) -> None:
    page = await watcher.open_page(viewport=DESK, java_script_enabled=False)
    await page.goto(f"{server.url}/chat")
    await page.locator("#text").fill("Say hello.")
    await page.locator("#max_tokens").fill("8")
    await page.get_by_role("button", name="Send").click()
    await expect(page).to_have_url(re.compile(r"/chat/[0-9a-f]{32}$"))
    await expect(page.locator(".answer.is-complete")).to_have_count(1, timeout=30_000)
    await expect(page.get_by_role("button", name="Copy")).to_be_hidden()
    await page.get_by_role("button", name="Regenerate").click()
    await expect(page.locator(".variants")).to_contain_text("2/2")
    await expect(page.locator(".answer.is-complete")).to_have_count(1, timeout=30_000)
    await page.get_by_title("Older variant").click()
    await expect(page.locator(".variants")).to_contain_text("1/2")
    await page.locator("#chat-menu summary").click()
    await page.get_by_role("button", name="Delete this chat").click()
    await expect(page).to_have_url(re.compile(r"/chat$"))


async def test_hostile_text_is_shown_and_copied_and_does_nothing(watcher: Watcher) -> None:
    async with fake_chat(watcher, permissions=["clipboard-read", "clipboard-write"]) as (page, api):
        payload = '<img src=x onerror="document.title=1"> <script>document.title=1</script> [x](javascript:1)'
        await page.locator("#max_tokens").fill("20")
        await page.locator("#system_prompt").fill(payload)
        await send(page, payload)
        await expect(page.locator(".answer.is-complete")).to_have_count(1)
        await expect(page.locator(".question")).to_have_text(payload)
        (conversation,) = api.plugin.chats._conversations.values()
        answer = conversation.turns[0].answer
        assert answer is not None
        answer.text = f"{payload}\n\n```html\n{payload}\n```\n\n[ok](https://example.org)"
        await page.reload()
        await expect(page.locator(".markdown")).to_contain_text("[x](javascript:1)")
        await expect(page.locator(".markdown pre")).to_contain_text(payload)
        await expect(page.locator(".markdown a")).to_have_count(1)
        await expect(page.locator(".markdown img, .markdown script")).to_have_count(0)
        assert payload[:20] in await page.title()
        await page.get_by_role("button", name="Copy this code").click()
        await expect(page.locator(".copy-code")).to_have_text("Copied")
        assert await page.evaluate("navigator.clipboard.readText()") == f"{payload}\n"


async def test_settings_are_marked_kept_and_reset(watcher: Watcher) -> None:
    async with fake_chat(watcher) as (page, _):
        changed = page.locator("#params-changed")
        await expect(changed).to_be_hidden()
        await page.locator("#top_k").fill("3")
        await page.locator("#system_prompt").fill("be kind")
        await expect(changed).to_contain_text("2 changed")
        await expect(page.locator(".param.is-changed")).to_have_count(2)
        await page.locator("#max_tokens").fill("5")
        await send(page, "hello")
        await expect(page.locator(".answer.is-complete")).to_have_count(1)
        await expect(changed).to_contain_text("3 changed")
        await expect(page.locator("#top_k")).to_have_value("3")
        await page.locator("#params-reset").click()
        await expect(changed).to_be_hidden()
        await expect(page.locator("#system_prompt")).to_have_value("")
        await page.locator("#max_tokens").fill("6")
        await page.get_by_role("button", name="Regenerate").click()
        await expect(page.locator(".figures")).to_contain_text("6 tokens")


async def test_a_chat_can_be_renamed_and_deleted(watcher: Watcher) -> None:
    async with fake_chat(watcher) as (page, _):
        await page.locator("#max_tokens").fill("5")
        await send(page, "hello")
        await expect(page.locator(".answer.is-complete")).to_have_count(1)
        await page.locator("#chat-menu summary").click()
        await page.locator("#title-field").fill("Lighthouses <b>")
        await page.get_by_role("button", name="Rename").click()
        await expect(page.get_by_role("heading", name="Lighthouses <b>")).to_be_visible()
        await expect(page.locator(".head-title")).to_have_text("Lighthouses <b>")
        await page.locator("#chat-menu summary").click()
        await page.get_by_role("button", name="Delete this chat").click()
        await expect(page).to_have_url(re.compile(r"/chat$"))
        await expect(page.locator(".head-title")).to_have_count(0)


async def test_a_chat_that_outgrew_the_context_goes_on_at_the_press_of_a_button(watcher: Watcher) -> None:
    async with fake_chat(watcher) as (page, _):
        await page.locator("#max_tokens").fill("100")
        await send(page, "a" * 150)
        await expect(page.locator(".answer.is-complete")).to_have_count(1)
        await send(page, "b" * 300)
        await expect(page.locator(".answer.is-failed")).to_contain_text("limited to 512")
        await page.get_by_role("button", name="Continue without the oldest turns").click()
        await expect(page.locator(".answer.is-complete")).to_have_count(2)
        await expect(page.locator(".turn.is-left-out")).to_have_count(1)
        await expect(page.locator(".log-note")).to_contain_text("1 of 2 turns")


async def test_what_is_wrong_is_said_beside_the_message(watcher: Watcher) -> None:
    async with fake_chat(watcher) as (page, _):
        await page.locator("#temperature").fill("9")
        await send(page, "keep me")
        await expect(page.locator("#composer-faults")).to_have_text(
            re.compile("temperature is 9.0; allowed: 0 to 2")
        )
        await expect(page.locator("#temperature")).to_have_attribute("aria-invalid", "true")
        await expect(page.locator("#text")).to_have_value("keep me")
        await page.locator("#temperature").fill("1")
        await page.locator("#max_tokens").fill("5")
        await send(page, "keep me")
        await expect(page.locator(".answer.is-complete")).to_have_count(1)
        await expect(page.locator(".fault")).to_have_count(0)
    assert [problem for problem in watcher.problems if "422" not in problem] == []
    watcher.problems.clear()


async def test_more_windows_than_a_browser_has_connections_all_go_on_and_can_stop(watcher: Watcher) -> None:
    async with fake_chat(watcher) as (page, api):
        await page.locator("#max_tokens").fill("450")
        api.engine.runner.step_s = 0.05
        await send(page, "hello")
        await expect(page).to_have_url(re.compile(r"/chat/[0-9a-f]{32}$"))
        await wait_for(page, f"({TEXT_OF_ANSWER}).length > 3")
        others = [await page.context.new_page() for _ in range(6)]
        for other in others:
            await other.goto(page.url, wait_until="domcontentloaded", timeout=15_000)

        # A tab that is hidden lets go, and goes on where it was when it is shown again.
        await hide(page, is_hidden=True)
        before = await page.evaluate(TEXT_OF_ANSWER)
        await wait_for(others[0], f"({TEXT_OF_ANSWER}).length > {len(before) + 20}")
        assert await page.evaluate(TEXT_OF_ANSWER) == before
        await hide(page, is_hidden=False)
        await wait_for(page, f"({TEXT_OF_ANSWER}).length > {len(before) + 20}")

        await page.locator(".stop").click()
        await expect(page.locator(".answer.is-stopped")).to_have_count(1, timeout=10_000)
        (conversation,) = api.plugin.chats._conversations.values()
        answer = conversation.turns[0].answer
        assert answer is not None
        assert await page.locator(".copy-answer").get_attribute("data-text") == answer.text


async def hide(page: Page, *, is_hidden: bool) -> None:
    await page.evaluate(
        """(isHidden) => {
          Object.defineProperty(document, "hidden", { get: () => isHidden, configurable: true });
          document.dispatchEvent(new Event("visibilitychange"));
        }""",
        is_hidden,
    )


@pytest.mark.parametrize("viewport", [{"width": 320, "height": 700}, DESK])
async def test_nothing_is_cut_off_sideways(watcher: Watcher, viewport: dict[str, int]) -> None:
    async with fake_chat(watcher, viewport=viewport) as (page, api):
        await page.locator("#max_tokens").fill("5")
        await page.locator("#text").fill("W" * 300)
        await page.get_by_role("button", name="Send").click()
        await expect(page.locator(".answer.is-complete")).to_have_count(1)
        (conversation,) = api.plugin.chats._conversations.values()
        answer = conversation.turns[0].answer
        assert answer is not None
        answer.text = f"{'x' * 400}\n\n```\n{'code ' * 80}\n```\n\n|{'a|' * 30}\n|{'-|' * 30}\n|{'b|' * 30}"
        await page.reload()
        await expect(page.locator(".markdown table")).to_be_visible()
        assert await page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
        await expect(page.locator("#send")).to_be_in_viewport()
        small = """[...document.querySelectorAll('button, select, summary, a.button')]
          .map((e) => [e.textContent.trim(), e.getBoundingClientRect()])
          .filter(([, box]) => box.width > 1 && (box.height < 24 || box.width < 24)).map(([text]) => text)"""
        assert await page.evaluate(small) == []
