"""What people change about recorded sessions: notes, stars, bookmarks, deletion. The steps never change."""

import asyncio
import time
from collections.abc import Callable
from uuid import uuid4

from sqlalchemy import Executable, delete, insert, update

from app.db.models import BookmarkRow, SessionRow
from app.db.writer import HistoryWriter, Write
from app.errors import HistoryUnavailableError, NotInHistoryError, SessionRunningError
from app.services.session_rows import Bookmark, SessionInfo
from app.services.sessions import SessionReader
from engine.errors import RequestError

MAX_NOTE_CHARS = 2_000
MAX_BOOKMARKS = 1_000
"""Of one session."""

WRITE_TIMEOUT_S = 5.0
"""How long a change may take before people are told that it waits."""


class SessionEditor:
    """Changes go through the history's writer, like everything else; a method returns when it is written.

    All raise `NotInHistoryError` for what is not there and `HistoryUnavailableError` if it cannot be written.
    """

    def __init__(
        self,
        reader: SessionReader,
        writer: HistoryWriter,
        session_id: str,
        *,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`session_id` is that of this server run."""
        self._reader = reader
        self._writer = writer
        self._session_id = session_id
        self._wall_ns = wall_ns

    async def change(
        self, session_id: str, *, note: str | None = None, is_starred: bool | None = None
    ) -> SessionInfo:
        """Set what is given and return the session."""
        await self._reader.facts(session_id)
        values: dict[str, str | bool] = {}
        if note is not None:
            values["note"] = _check_note(note)
        if is_starred is not None:
            values["is_starred"] = is_starred
        if values:
            await self._write(update(SessionRow).where(SessionRow.id == session_id).values(**values))
        return await self._reader.get(session_id)

    async def delete(self, session_id: str) -> None:
        """Delete a session with its steps, requests and bookmarks; not the one that runs."""
        await self._reader.facts(session_id)
        if session_id == self._session_id:
            raise SessionRunningError("This session is running; it can be deleted once its server has ended.")
        await self._write(delete(SessionRow).where(SessionRow.id == session_id))

    async def add_bookmark(self, session_id: str, step: int, note: str) -> Bookmark:
        """Mark a step of the session."""
        info = await self._reader.facts(session_id)
        _check_note(note)
        if not info.first_step - 1 <= step <= info.last_step:
            raise RequestError(
                f"step is {step}; the session has steps {info.first_step} to {info.last_step}.", param="step"
            )
        if len(await self._reader.bookmarks(session_id)) >= MAX_BOOKMARKS:
            raise RequestError(f"The session has {MAX_BOOKMARKS} bookmarks; delete some first.", param="step")
        bookmark = Bookmark(id=uuid4().hex, step=step, note=note, created_ns=self._wall_ns())
        row = {
            "id": bookmark.id,
            "session_id": session_id,
            "step": step,
            "note": note,
            "created_ns": bookmark.created_ns,
        }
        await self._write(insert(BookmarkRow).values(**row))
        return bookmark

    async def delete_bookmark(self, session_id: str, bookmark_id: str) -> None:
        """Take a bookmark away."""
        await self._reader.facts(session_id)
        if all(bookmark.id != bookmark_id for bookmark in await self._reader.bookmarks(session_id)):
            raise NotInHistoryError(f"The session has no bookmark {bookmark_id!r}.")
        await self._write(delete(BookmarkRow).where(BookmarkRow.id == bookmark_id))

    async def _write(self, statement: Executable) -> None:
        lost: list[bool] = []
        self._writer.put(Write(statement, on_lost=lambda: lost.append(True)))
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await self._writer.settle()
        except TimeoutError:
            reason = self._writer.status.reason or "The history is busy."
            raise HistoryUnavailableError(f"{reason} The change waits until it can be written.") from None
        if lost:
            reason = self._writer.status.reason or "The history has no room for it."
            raise HistoryUnavailableError(f"{reason} The change was not made.")


def _check_note(note: str) -> str:
    if len(note) > MAX_NOTE_CHARS:
        raise RequestError(f"note has {len(note)} characters; allowed: {MAX_NOTE_CHARS}.", param="note")
    return note
