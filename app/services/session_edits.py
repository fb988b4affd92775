"""What people change about recorded sessions: notes, stars, bookmarks, deletion. The steps never change."""

import time
from collections.abc import Callable
from uuid import uuid4

from sqlalchemy import delete, insert, update

from app.db.database import Database
from app.db.models import BookmarkRow, SessionRow
from app.db.writer import HistoryWriter
from app.errors import HistoryUnavailableError, NotInHistoryError, SessionRunningError
from app.history.deletion import delete_session
from app.services.session_rows import Bookmark, SessionInfo
from app.services.sessions import SessionReader
from app.services.write_through import write_through
from engine.errors import RequestError

MAX_NOTE_CHARS = 2_000
MAX_BOOKMARKS = 1_000
"""Of one session."""


class SessionEditor:
    """Small changes go through the history's writer; a method returns when all is written.

    All raise `NotInHistoryError` for what is not there and `HistoryUnavailableError` if it cannot be written.
    """

    def __init__(
        self,
        reader: SessionReader,
        database: Database,
        writer: HistoryWriter,
        session_id: str,
        *,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`session_id` is that of this server run."""
        self._reader = reader
        self._database = database
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
            await write_through(
                self._writer, update(SessionRow).where(SessionRow.id == session_id).values(**values)
            )
        return await self._reader.get(session_id)

    async def delete(self, session_id: str) -> None:
        """Delete a session with its steps, requests and bookmarks; not the one that runs."""
        await self._reader.facts(session_id)
        if session_id == self._session_id:
            raise SessionRunningError("This session is running; it can be deleted once its server has ended.")
        try:
            await delete_session(self._database, session_id)
        except HistoryUnavailableError as error:
            raise HistoryUnavailableError(
                f"{error} The session is still there, perhaps in part; delete it again later."
            ) from error

    async def add_bookmark(self, session_id: str, step: int, note: str) -> Bookmark:
        """Mark a step of the session."""
        _check_note(note)
        await self._reader.check_step(session_id, step)
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
        await write_through(self._writer, insert(BookmarkRow).values(**row))
        return bookmark

    async def delete_bookmark(self, session_id: str, bookmark_id: str) -> None:
        """Take a bookmark away."""
        await self._reader.facts(session_id)
        if all(bookmark.id != bookmark_id for bookmark in await self._reader.bookmarks(session_id)):
            raise NotInHistoryError(f"The session has no bookmark {bookmark_id!r}.")
        await write_through(self._writer, delete(BookmarkRow).where(BookmarkRow.id == bookmark_id))


def _check_note(note: str) -> str:
    if len(note) > MAX_NOTE_CHARS:
        raise RequestError(f"note has {len(note)} characters; allowed: {MAX_NOTE_CHARS}.", param="note")
    if "\0" in note:
        raise RequestError("note has a NUL character; leave it out.", param="note")
    return note
