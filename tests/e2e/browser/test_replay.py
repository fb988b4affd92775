"""A recorded session in the browser: every step is the recorded one, however it is reached."""

import asyncio
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Page, Route, expect

from tests.e2e.browser.conftest import Watcher
from tests.e2e.browser.picture import POLL_S, TIMEOUT_S, USUAL_STATES, compare, read_picture, wait_for
from tests.support.api import ServedApi, served_api
from tests.support.recorded import make_small_engine, record_session, send_chats, served_copy

pytestmark = pytest.mark.browser

DESK = {"width": 1440, "height": 900}
SIZES = [(320, 700), (768, 1024), (1440, 900)]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("recording") / "data"
    return folder, asyncio.run(record_session(folder))


@pytest_asyncio.fixture(loop_scope="session")
async def recorded(recording: tuple[Path, str], tmp_path: Path) -> AsyncIterator[tuple[ServedApi, str]]:
    folder, session = recording
    async with served_copy(folder, tmp_path / "recorded") as api:
        yield api, session


async def read_recorded_state(api: ServedApi, session: str, step: int) -> dict[str, Any]:
    response = await api.client.get(f"/api/sessions/{session}/state", params={"step": step})
    assert response.status_code == 200, response.text
    state: dict[str, Any] = response.json()
    return state


async def read_session(api: ServedApi, session: str) -> dict[str, Any]:
    response = await api.client.get(f"/api/sessions/{session}")
    assert response.status_code == 200, response.text
    facts: dict[str, Any] = response.json()
    return facts


async def open_session(
    watcher: Watcher, api: ServedApi, session: str, query: str = "", **options: Any
) -> Page:
    page = await watcher.open_page(**{"viewport": DESK, "reduced_motion": "reduce", **options})
    await page.goto(f"{api.url}/s/{session}{query}")
    await wait_for(page, "window.pageglass?.paintedStep >= 0")
    return page


async def go_to(page: Page, step: int) -> None:
    await page.locator("#replay-goto").fill(str(step))
    await page.locator("#replay-goto").press("Enter")
    await wait_for(page, f"window.pageglass.paintedStep === {step}")


async def painted_step(page: Page) -> int:
    step: int = await page.evaluate("() => window.pageglass.paintedStep")
    return step


async def check_picture(page: Page, api: ServedApi, session: str, mode: str = "request") -> set[str]:
    """Compare every block of the step that is shown with the recorded state."""
    async with asyncio.timeout(TIMEOUT_S):
        while (picture := await read_picture(page)) is None:
            await asyncio.sleep(POLL_S)
    return compare(picture, await read_recorded_state(api, session, picture.step), mode)


async def test_every_step_that_is_gone_to_shows_the_recorded_blocks(
    recorded: tuple[ServedApi, str], watcher: Watcher
) -> None:
    api, session = recorded
    last = (await read_session(api, session))["last_step"]
    page = await open_session(watcher, api, session)
    assert await painted_step(page) == last
    rng = random.Random(1)
    seen: set[str] = set()
    for mode in ("request", "state"):
        await page.locator(f"[data-mode={mode}]").click()
        for step in (1, last, *(rng.randrange(1, last + 1) for _ in range(8))):
            await go_to(page, step)
            seen |= await check_picture(page, api, session, mode)
            assert await page.evaluate("() => window.pageglass.view.steps.lastStep") == step
    assert seen >= USUAL_STATES


async def test_scrubbing_and_stepping_reach_neighbouring_steps(
    recorded: tuple[ServedApi, str], watcher: Watcher
) -> None:
    api, session = recorded
    page = await open_session(watcher, api, session, "?step=250")
    slider = page.locator("#replay-slider")
    box = await slider.bounding_box()
    assert box is not None
    await page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    await page.mouse.down()
    for share in (0.4, 0.6, 0.55, 0.3):
        await page.mouse.move(box["x"] + box["width"] * share, box["y"] + box["height"] / 2)
    await page.mouse.up()
    step = int(await slider.input_value())
    await wait_for(page, f"window.pageglass.paintedStep === {step}")
    await check_picture(page, api, session)
    await page.locator("#replay-title").click()
    for key, by in (("ArrowRight", 1), ("ArrowLeft", -1), ("Shift+ArrowRight", 10), ("Alt+ArrowRight", 100)):
        await page.locator("#replay").focus()
        await page.keyboard.press(key)
        step += by
        await wait_for(page, f"window.pageglass.paintedStep === {step}")
        await check_picture(page, api, session)
    await page.locator("#replay-back").click()
    await wait_for(page, f"window.pageglass.paintedStep === {step - 1}")
    await page.locator("#timeline").click(position={"x": 900, "y": 40})
    await wait_for(page, f"window.pageglass.paintedStep < {step - 1}")
    await check_picture(page, api, session)
    await page.locator("#replay").focus()
    await page.keyboard.press("Home")
    await wait_for(page, "window.pageglass.paintedStep === 1")
    await check_picture(page, api, session)


async def test_it_plays_to_the_end_and_every_rest_is_a_recorded_step(
    recorded: tuple[ServedApi, str], watcher: Watcher
) -> None:
    api, session = recorded
    last = (await read_session(api, session))["last_step"]
    page = await open_session(watcher, api, session, "?step=240")
    await page.locator("#replay-speed").select_option("0.5")
    await page.locator("#replay").focus()
    await page.keyboard.press("Space")
    await expect(page.locator("#replay-play")).to_have_text("Pause")
    await wait_for(page, "window.pageglass.paintedStep > 270")  # over the seam of two chunks
    await page.keyboard.press("Space")
    await expect(page.locator("#replay-play")).to_have_text("Play")
    step = await painted_step(page)
    await wait_for(page, f"location.search.includes('step={step}')")
    await check_picture(page, api, session)
    await page.locator("#replay-pace").select_option("steady")
    await page.locator("#replay-play").click()
    await wait_for(page, f"window.pageglass.paintedStep > {step + 1}")
    await page.locator("#replay-pace").select_option("engine")
    await page.locator("#replay-speed").select_option("16")
    await wait_for(page, f"window.pageglass.paintedStep === {last}")
    await expect(page.locator("#replay-play")).to_have_text("Play")
    await check_picture(page, api, session)


async def test_a_link_leads_to_its_step_and_lights_up_its_request(
    recorded: tuple[ServedApi, str], watcher: Watcher
) -> None:
    api, session = recorded
    state = await read_recorded_state(api, session, 200)
    running = state["running"][0]
    query = f"?step=200&request={running['request_id']}"
    page = await open_session(watcher, api, session, query)
    row = page.locator("#running-table tr.is-selected")
    await expect(row).to_have_attribute("data-request", running["request_id"])
    await expect(page.locator("#replay-follow")).to_contain_text("Following")
    link = page.locator("#replay-follow a")
    await expect(link).to_have_attribute("href", f"/r/{running['request_id']}")
    held = f"""(() => {{
      const {{ view, grid }} = window.pageglass;
      const active = [...view.cells.keys()].filter((id) => (view.cells[id] & 15) === 2);
      const isLit = (id) => String(grid.pixel(id)) === String(grid.colorOf("active", view.cells[id] >>> 16));
      return active.every((id) => isLit(id) === (view.cells[id] >>> 16 === {running["slot"]}));
    }})()"""
    await wait_for(page, held)
    await page.locator("#replay-forward").click()
    await wait_for(page, "location.search.startsWith('?step=201&request=')")
    await page.keyboard.press("Escape")
    await expect(row).to_have_count(0)
    await wait_for(page, "location.search === '?step=201'")
    await page.reload()
    await wait_for(page, "window.pageglass?.paintedStep === 201")
    await page.goto(f"{api.url}/s/{session}?step=200&seq={running['seq_id']}")
    await expect(row).to_have_attribute("data-request", running["request_id"])
    await wait_for(page, held)


async def test_markers_and_bookmarks_are_places_to_jump_to(
    recorded: tuple[ServedApi, str], watcher: Watcher
) -> None:
    api, session = recorded
    page = await open_session(watcher, api, session, "?step=1")
    markers = (await api.client.get(f"/api/sessions/{session}/markers")).json()["items"]
    preempted = next(marker["step"] for marker in markers if marker["kind"] == "preempt")
    await page.locator("#replay").focus()
    await page.wait_for_load_state("networkidle")
    await page.keyboard.press("p")
    await wait_for(page, f"window.pageglass.paintedStep === {preempted}")
    await expect(page.locator("#replay-note")).to_contain_text("preempted")
    await expect(page.locator("#replay-note a").first).to_have_attribute("href", re.compile("^/r/chatcmpl-"))
    await page.keyboard.press("BracketLeft")
    before = max((marker["step"] for marker in markers if marker["step"] < preempted), default=preempted)
    await wait_for(page, f"window.pageglass.paintedStep === {before}")
    await page.keyboard.press("g")
    await expect(page.locator("#replay-goto")).to_be_focused()
    await page.keyboard.type("99999999")
    await page.keyboard.press("Escape")  # the keys work again, and the field says where one is
    await expect(page.locator("#replay-goto")).to_have_value(str(before))
    await page.keyboard.press("b")
    await expect(page.locator("#bookmark-note")).to_be_focused()
    await expect(page.locator("#bookmark-note")).to_have_value("")
    await page.locator("#bookmark-note").fill("<b>look</b> here")
    await page.keyboard.press("Enter")
    await expect(page.locator("#bookmarks li")).to_have_count(1)
    await expect(page.locator("#bookmarks a")).to_contain_text("<b>look</b> here")
    await expect(page.locator("#replay-note")).to_contain_text("bookmark: <b>look</b> here")
    await go_to(page, 5)
    await page.locator("#bookmarks a").click()
    await wait_for(page, f"window.pageglass.paintedStep === {before}")
    strip = await page.locator("#replay-markers").bounding_box()
    assert strip is not None
    last = int(await page.locator("#replay-slider").get_attribute("max") or 0)
    x = 8 + (strip["width"] - 16) * (preempted - 1) / (last - 1)
    await page.locator("#replay-markers").hover(position={"x": x, "y": 8})
    await expect(page.locator("#replay-tip")).to_contain_text(f"Step {preempted}: ")
    await page.locator("#replay-markers").click(position={"x": x, "y": 8})
    await wait_for(page, f"window.pageglass.paintedStep === {preempted}")
    await page.locator("#bookmarks button").click()
    await expect(page.locator("#bookmarks li")).to_have_count(0)


async def test_without_scripts_each_step_is_tables(recorded: tuple[ServedApi, str], watcher: Watcher) -> None:
    api, session = recorded
    state = await read_recorded_state(api, session, 200)
    page = await watcher.open_page(viewport=DESK, java_script_enabled=False)
    await page.goto(f"{api.url}/sessions")
    await page.locator(f"#session-{session} .when a").click()
    await page.locator("#replay-goto").fill("200")
    await page.locator("#replay-go button").click()
    for name in ("free", "cached", "active", "tail", "shared"):
        number = sum(block["state"] == name for block in state["blocks"])
        row = page.locator(".facts").first.get_by_role("row", name=re.compile(f"^{name} "))
        await expect(row.locator("td").first).to_have_text(str(number))
    await expect(page.locator("#running-table tbody tr")).to_have_count(len(state["running"]))
    await expect(page.locator("#stat-step")).to_have_text("200")
    await page.get_by_role("link", name="Step 201").click()
    await expect(page.locator("#stat-step")).to_have_text("201")


async def test_the_running_session_can_be_replayed_and_grows(watcher: Watcher, tmp_path: Path) -> None:
    async with served_api(make_small_engine(), data_dir=tmp_path / "running") as api:
        session = api.plugin.hub.session_id
        await send_chats(api, num=6)
        page = await open_session(watcher, api, session)
        await expect(page.locator("#replay-live")).to_be_visible()
        first = int(await page.locator("#replay-slider").get_attribute("max") or 0)
        await page.locator("#replay-speed").select_option("16")
        await page.locator("#replay-play").click()
        await send_chats(api, num=4, seed=4)
        last = api.plugin.hub.snapshot.step if api.plugin.hub.snapshot else 0
        assert last > first
        await wait_for(page, f"window.pageglass.paintedStep === {last}")
        await page.locator("#replay-play").click()
        await check_picture(page, api, session)
        await go_to(page, first)
        await check_picture(page, api, session)
        await page.locator("#replay-live").click()
        await expect(page.locator("#connection-text")).to_have_text("live")


async def test_when_the_history_cannot_be_read_the_page_says_so_and_goes_on_later(
    recorded: tuple[ServedApi, str], watcher: Watcher
) -> None:
    api, session = recorded
    page = await watcher.open_page(viewport=DESK)

    async def refuse(route: Route) -> None:
        await route.fulfill(status=503, json={"detail": "The disk is gone."})

    await page.route("**/chunks/257", refuse)
    await page.goto(f"{api.url}/s/{session}?step=20")
    await wait_for(page, "window.pageglass?.paintedStep === 20")
    await page.locator("#replay-goto").fill("300")
    await page.locator("#replay-goto").press("Enter")
    await expect(page.locator("#banner")).to_contain_text("The recording cannot be read: The disk is gone.")
    assert await painted_step(page) == 20
    await page.unroute("**/chunks/257")
    await wait_for(page, "window.pageglass.paintedStep === 300")
    await expect(page.locator("#banner")).to_be_hidden()
    watcher.problems = [problem for problem in watcher.problems if "503" not in problem]


async def test_on_a_phone_the_bar_is_in_reach_of_the_grid(
    recorded: tuple[ServedApi, str], watcher: Watcher
) -> None:
    api, session = recorded
    page = await open_session(watcher, api, session, "?step=200", viewport={"width": 360, "height": 780})
    await expect(page.locator("#grid")).to_be_in_viewport(ratio=0.9)
    for control in ("#replay-play", "#replay-forward", "#replay-slider", "#replay-goto"):
        await expect(page.locator(control)).to_be_in_viewport(ratio=1)
    await page.locator("#replay-forward").click()
    await wait_for(page, "window.pageglass.paintedStep === 201")
    await expect(page.locator("#stat-decode")).not_to_have_text("0")


async def test_nothing_is_cut_off_sideways(recorded: tuple[ServedApi, str], watcher: Watcher) -> None:
    api, session = recorded
    small = """() => [...document.querySelectorAll('button, select, a[href], input:not([type=hidden])')]
      .map((e) => [e.id || e.textContent.trim(), e.getBoundingClientRect()])
      .filter(([, box]) => box.width > 1 && (box.height < 24 || box.width < 24)).map(([text]) => text)"""
    page = await open_session(watcher, api, session, "?step=200")
    for path in (f"/s/{session}?step=200", "/sessions"):
        await page.goto(f"{api.url}{path}")
        for width, height in SIZES:
            await page.set_viewport_size({"width": width, "height": height})
            assert await page.evaluate("() => document.documentElement.scrollWidth") <= width
            assert await page.evaluate(small) == []
