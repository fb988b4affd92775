"""Changes that people ask for: they want to know whether they were made."""

import asyncio
from collections.abc import Callable
from typing import Final

from sqlalchemy import Executable

from app.db.writer import HistoryWriter
from app.db.writes import Write
from app.errors import HistoryUnavailableError

WRITE_TIMEOUT_S: Final = 5.0
"""How long a change may take before people are told that it waits."""


async def write_through(
    writer: HistoryWriter,
    *statements: Executable,
    what: str = "The change",
    on_lost: Callable[[], object] = lambda: None,
) -> None:
    """Write statements in one transaction and return when they are written.

    Raises `HistoryUnavailableError`, which says why and speaks of `what`: if they are lost, which `on_lost`
    is told too, and if they still wait. What waits may be lost later; `on_lost` is told then.
    """
    lost: list[bool] = []

    def lose() -> None:
        lost.append(True)
        on_lost()

    first, *others = statements
    writer.put(Write(first, on_lost=lose), *(Write(statement) for statement in others))
    if not lost:
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await writer.settle()
        except TimeoutError:
            reason = writer.status.reason or "The history is busy."
            raise HistoryUnavailableError(f"{reason} {what} waits until it can be written.") from None
    if lost:
        reason = writer.status.reason or "The history has no room for it."
        raise HistoryUnavailableError(f"{reason} {what} was not made.")
