"""Reads the block grid back from a page and compares it with what the engine reports."""

import asyncio
from dataclasses import dataclass
from typing import Any

import httpx
from playwright.async_api import Error, Page

TIMEOUT_S = 200.0
"""For a model that computes on a busy machine."""

POLL_S = 0.02
_LEAVING = ("Execution context was destroyed", "Cannot find context")
NO_SLOT = 65535

STATE_COLORS = {
    "free": (0x1B, 0x24, 0x30),
    "cached": (0x5A, 0x6F, 0x8A),
    "active": (0x3A, 0x93, 0xD6),
    "tail": (0x3F, 0xC7, 0x9A),
    "shared": (0xF0, 0xE4, 0x42),
    "reserved": (0x6B, 0x72, 0x80),
}
"""The dark theme's states, as the legend shows them."""

SLOT_COLORS = (
    (0xE6, 0x9F, 0x00),
    (0x56, 0xB4, 0xE9),
    (0x00, 0x9E, 0x73),
    (0xF0, 0xE4, 0x42),
    (0x00, 0x72, 0xB2),
    (0xD5, 0x5E, 0x00),
    (0xCC, 0x79, 0xA7),
)
"""The first seven slots: Okabe and Ito's palette."""

CACHED_TINT = 0.25
NAMES = ("free", "cached", "active", "tail", "shared", "reserved", "offloaded")
USUAL_STATES = set(NAMES[:5])
"""Those that any traffic brings about, and that last longer than a step."""

# What is still to be painted is painted in the next frame: going to the same step twice shows only in pixels.
_READ = """async (knownStep) => {
  for (let i = 0; i < 2; i++) await new Promise((resolve) => requestAnimationFrame(resolve));
  const { view, grid, paintedStep } = window.pageglass;
  if (view.numBlocks === 0 || view.step !== paintedStep || paintedStep === knownStep) return null;
  const ids = [...view.cells.keys()];
  return { step: paintedStep, cells: [...view.cells], pixels: ids.map((id) => grid.pixel(id)) };
}"""

Color = tuple[int, int, int]


@dataclass(frozen=True)
class Picture:
    """What the canvas shows at `step`: packed cells as the page knows them, and the pixels it painted."""

    step: int
    cells: list[int]
    pixels: list[Color]


async def wait_for(page: Page, expression: str) -> None:
    """Wait for a JavaScript expression; playwright's own wait needs eval, which the page forbids."""
    async with asyncio.timeout(TIMEOUT_S):
        while not await _holds(page, expression):
            await asyncio.sleep(POLL_S)


async def _holds(page: Page, expression: str) -> bool:
    """Evaluate; a page that is being left for another (a first question leads to its chat) has no say."""
    try:
        return bool(await page.evaluate(f"() => {expression}"))
    except Error as error:
        if not any(words in str(error) for words in _LEAVING):
            raise
        return False


async def read_picture(page: Page, known_step: int = -1) -> Picture | None:
    """Return the picture if what is painted is what the page knows; both are read in one go.

    None also when it still is that of `known_step`.
    """
    read = await page.evaluate(_READ, known_step)
    if read is None:
        return None
    return Picture(read["step"], read["cells"], [(r, g, b) for r, g, b in read["pixels"]])


async def read_state(client: httpx.AsyncClient) -> dict[str, Any]:
    """Return `/api/engine/state` with its blocks."""
    response = await client.get("/api/engine/state")
    response.raise_for_status()
    state: dict[str, Any] = response.json()
    return state


def expected_color(block: dict[str, Any], mode: str) -> Color:
    """Return the colour of a block as the engine reports it."""
    plain = STATE_COLORS[block["state"]]
    slot = block["slot"]
    if mode == "state" or slot < 0 or block["state"] == "free":
        return plain
    owner = SLOT_COLORS[slot]
    if block["state"] != "cached":
        return owner
    red, green, blue = (
        int(base + (tint - base) * CACHED_TINT + 0.5) for base, tint in zip(plain, owner, strict=True)
    )
    return red, green, blue


def compare(picture: Picture, state: dict[str, Any], mode: str) -> set[str]:
    """Check every block, cell and pixel, at the same step; return the states that occurred."""
    assert picture.step == state["step"]
    assert len(picture.cells) == len(state["blocks"])
    for block, cell, pixel in zip(state["blocks"], picture.cells, picture.pixels, strict=True):
        assert NAMES[cell & 15] == block["state"], block
        slot = cell >> 16
        assert (-1 if slot == NO_SLOT else slot) == block["slot"], block
        assert (cell >> 8 & 255) == (block["filled"] if block["state"] == "tail" else block["ref_cnt"]), block
        assert pixel == expected_color(block, mode), (mode, block)
    return {block["state"] for block in state["blocks"]}


async def compare_while_running(page: Page, url: str, mode: str, *, until: set[str]) -> set[str]:
    """Compare picture and engine at all steps at which both were read, until all states have occurred."""
    seen: set[str] = set()
    states: dict[int, dict[str, Any]] = {}
    pictures: dict[int, Picture] = {}
    known_step = -1
    async with httpx.AsyncClient(base_url=url, timeout=10) as client, asyncio.timeout(TIMEOUT_S):
        while not until <= seen:
            picture, state = await asyncio.gather(read_picture(page, known_step), read_state(client))
            states[state["step"]] = state
            if picture is not None:
                known_step = picture.step
                pictures[known_step] = picture
            for step in states.keys() & pictures.keys():
                seen |= compare(pictures.pop(step), states[step], mode)
            await asyncio.sleep(POLL_S)
    return seen


async def compare_at_rest(page: Page, url: str, mode: str = "request") -> set[str]:
    """Wait until the engine rests and the page has caught up, then compare."""
    async with httpx.AsyncClient(base_url=url, timeout=10) as client, asyncio.timeout(TIMEOUT_S):
        while True:
            state = await read_state(client)
            picture = await read_picture(page)
            is_quiet = not state["running"] and not state["waiting"]
            if is_quiet and picture is not None and picture.step == state["step"]:
                await asyncio.sleep(0.5)  # transient marks fade for 0.4 s
                again = await read_picture(page)
                if again is not None and again.step == state["step"]:
                    return compare(again, state, mode)
            await asyncio.sleep(POLL_S)
