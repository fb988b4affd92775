"""Pages of recorded sessions: their list, and the engine view at any step of one."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from litestar import Controller, Request, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath
from litestar.response import Redirect, Template

from app.errors import HistoryUnavailableError, NotInHistoryError
from app.realtime.decisions import make_decisions
from app.services.requests import RequestReader
from app.services.session_edits import SessionEditor
from app.services.session_rows import Gap, SessionInfo
from app.services.sessions import SessionReader
from app.web.decision_context import DecisionLink, list_links
from app.web.form_data import read_form
from app.web.live_context import (
    describe_reasons,
    describe_states,
    make_recorded_panels,
)
from app.web.page_context import PAGE_HEADERS, PageFrame
from app.web.query_values import MAX_INTEGER, parse_int, read_int
from app.web.sessions_api import make_cursor, parse_cursor
from app.web.table_context import make_tables
from engine.snapshot import EngineSnapshot

AnyRequest = Request[Any, Any, Any]

PAGE_ROWS: Final = 50
MAX_DECISIONS: Final = 50
"""Decisions of a step that are listed under the timeline; the drawer lists all."""

SPEEDS: Final = (0.1, 0.25, 0.5, 1, 2, 4, 8, 16)

NAV_PATH: Final = "/sessions"
_MAX_FORM_BYTES: Final = 64 * 1024
_KIB: Final = 1024


class SessionPagesController(Controller):
    """`/sessions`, `/s/{session}` and its parts."""

    path = "/"
    include_in_schema = False
    request_max_body_size = _MAX_FORM_BYTES

    @get("/sessions", name="sessions")
    async def sessions_page(
        self,
        request: AnyRequest,
        sessions: NamedDependency[SessionReader],
        frame: NamedDependency[PageFrame],
    ) -> Template:
        """List the recorded server runs, newest first."""
        before = request.query_params.get("before")
        cursor = parse_cursor(before)
        rows: list[SessionInfo] = []
        problem = ""
        try:
            rows = await sessions.list_sessions(PAGE_ROWS + 1, cursor)
        except HistoryUnavailableError as error:
            problem = str(error)
        context = {
            "sessions": rows[:PAGE_ROWS],
            "next_cursor": make_cursor(rows[PAGE_ROWS - 1]) if len(rows) > PAGE_ROWS else None,
            "is_first_page": before is None,
            "problem": problem,
            "format_size": format_size,
        }
        page = frame.render_page(request, "pages/sessions.html", NAV_PATH, context)
        page.status_code = 503 if problem else 200
        return page

    @get("/s/{session_id:str}", name="session")
    async def session_page(
        self,
        session_id: FromPath[str],
        request: AnyRequest,
        sessions: NamedDependency[SessionReader],
        requests: NamedDependency[RequestReader],
        frame: NamedDependency[PageFrame],
    ) -> Template:
        """Show one step of a session, by default its last; with scripts, all of them."""
        step = read_step(request)
        info = await sessions.get(session_id)
        gaps = await sessions.gaps(info)
        try:
            snapshot = await sessions.snapshot_at(session_id, step)
        except NotInHistoryError as error:
            return frame.render_error(request, 404, str(error), links_instead(info, gaps, step))
        context = {
            "has_stream": True,
            "model_name": info.model,
            "engine_info": info.engine,
            "parts_path": f"/s/{info.id}",
            "session": info,
            "gaps_json": msgspec.json.encode(gaps).decode(),
            "bookmarks": await sessions.bookmarks(info.id),
            "previous_step": neighbour(info, gaps, snapshot.step, -1),
            "next_step": neighbour(info, gaps, snapshot.step, 1),
            "unknown_request": await _find_unknown_request(request, requests, session_id),
            "speeds": SPEEDS,
            "states": describe_states(),
            "reasons": describe_reasons(),
            "panels": make_recorded_panels(snapshot),
            "decisions": _list_decisions(snapshot),
            "tables": make_tables(snapshot),
        }
        return frame.render_page(request, "pages/session.html", NAV_PATH, context)

    @get("/s/{session_id:str}/panels", name="session-panels")
    async def panels(
        self,
        session_id: FromPath[str],
        request: AnyRequest,
        sessions: NamedDependency[SessionReader],
        frame: NamedDependency[PageFrame],
    ) -> Template:
        """Return the request list and, for the status bar, the totals as of a step."""
        snapshot = await sessions.snapshot_at(session_id, read_step(request))
        context = {
            "panels": make_recorded_panels(snapshot),
            "decisions": _list_decisions(snapshot),
            "parts_path": f"/s/{session_id}",
        }
        return frame.render_part("partials/_panels.html", context)

    @get("/s/{session_id:str}/tables", name="session-tables")
    async def tables(
        self,
        session_id: FromPath[str],
        request: AnyRequest,
        sessions: NamedDependency[SessionReader],
        frame: NamedDependency[PageFrame],
    ) -> Template:
        """Return the grid as tables as of a step."""
        snapshot = await sessions.snapshot_at(session_id, read_step(request))
        return frame.render_part("partials/_tables.html", {"tables": make_tables(snapshot)})

    # ---------------------------------------------------------------- changes

    @post("/s/{session_id:str}/bookmarks", name="add-bookmark")
    async def add_bookmark(
        self,
        session_id: FromPath[str],
        request: AnyRequest,
        sessions: NamedDependency[SessionReader],
        session_edits: NamedDependency[SessionEditor],
        frame: NamedDependency[PageFrame],
    ) -> Template | Redirect:
        """Mark a step; return the list of bookmarks, or go back to the step."""
        form = await read_form(request)
        step = parse_int(str(form.get("step", "")), "step", 0, MAX_INTEGER)
        await session_edits.add_bookmark(session_id, step, str(form.get("note", "")).strip())
        return await _show_bookmarks(request, sessions, frame, session_id, step)

    @post("/s/{session_id:str}/bookmarks/{bookmark_id:str}/delete", name="delete-bookmark")
    async def delete_bookmark(
        self,
        session_id: FromPath[str],
        bookmark_id: FromPath[str],
        request: AnyRequest,
        sessions: NamedDependency[SessionReader],
        session_edits: NamedDependency[SessionEditor],
        frame: NamedDependency[PageFrame],
    ) -> Template | Redirect:
        """Take a bookmark away; return the list of bookmarks, or go back to the session."""
        await session_edits.delete_bookmark(session_id, bookmark_id)
        return await _show_bookmarks(request, sessions, frame, session_id, None)

    @post("/s/{session_id:str}/star", name="star-session")
    async def star(
        self,
        session_id: FromPath[str],
        request: AnyRequest,
        session_edits: NamedDependency[SessionEditor],
    ) -> Redirect:
        """Keep a session when room is needed, or no longer (`on`: 1 or 0); go back to the list."""
        form = await read_form(request)
        await session_edits.change(
            session_id, is_starred=bool(parse_int(str(form.get("on", "")), "on", 0, 1))
        )
        return _go(f"{NAV_PATH}#session-{session_id}")

    @post("/s/{session_id:str}/note", name="note-session")
    async def note(
        self,
        session_id: FromPath[str],
        request: AnyRequest,
        session_edits: NamedDependency[SessionEditor],
    ) -> Redirect:
        """Set the note of a session; go back to the list."""
        form = await read_form(request)
        await session_edits.change(session_id, note=str(form.get("note", "")).strip())
        return _go(f"{NAV_PATH}#session-{session_id}")

    @post("/s/{session_id:str}/delete", name="delete-session")
    async def delete_session(
        self, session_id: FromPath[str], session_edits: NamedDependency[SessionEditor]
    ) -> Redirect:
        """Delete a session that has ended; go back to the list."""
        await session_edits.delete(session_id)
        return _go(NAV_PATH)


def read_step(request: AnyRequest) -> int | None:
    """Return `step` of the address, None without one; raises `RequestError` if it is no number."""
    step = read_int(request, "step", -1, 0)
    return None if step < 0 else step


def _list_decisions(snapshot: EngineSnapshot) -> list[DecisionLink]:
    """Return what was decided in the step that led to a state."""
    record = snapshot.last_record
    # Who has ended in the step itself is not named here; the drawer, which knows the state before, names all.
    return list_links(make_decisions(snapshot, record))[:MAX_DECISIONS] if record is not None else []


def links_instead(info: SessionInfo, gaps: Sequence[Gap], step: int | None) -> list[tuple[str, str]]:
    """Return names and paths of what there is of a session that lacks the step asked for."""
    steps: list[int] = []
    names: dict[int, str] = {}
    if info.config is not None and info.first_step <= info.last_step:
        around = [] if step is None else [neighbour(info, gaps, step, by) for by in (-1, 1)]
        first = neighbour(info, gaps, info.first_step - 1, 1) or info.last_step  # it may begin with a gap
        steps = sorted({first, *(near for near in around if near is not None), info.last_step})
        names = {info.last_step: "Last step", first: "First step"}
    pages = (("Its requests", f"/requests?session={info.id}"), ("Its charts", f"/s/{info.id}/charts"))
    return [
        *((f"{names.get(at, 'Step')}, {at:,}", f"/s/{info.id}?step={at}") for at in steps),
        *pages,
    ]


async def _find_unknown_request(request: AnyRequest, requests: RequestReader, session_id: str) -> str:
    """Return the request that the address names if the session has no such one, else nothing."""
    request_id = str(request.query_params.get("request", ""))
    if not request_id:
        return ""
    try:
        whole = await requests.get(request_id)
    except NotInHistoryError:
        return request_id
    return "" if whole.facts.session_id == session_id else request_id


def neighbour(info: SessionInfo, gaps: Sequence[Gap], step: int, direction: int) -> int | None:
    """Return the next step (1) or the one before (-1) whose state is known; None at either end.

    Of a gap only the end is known.
    """
    found = step + direction
    for gap in gaps:
        if gap.first_step <= found < gap.last_step:
            found = gap.last_step if direction > 0 else gap.first_step - 1
    return found if info.first_step <= found <= info.last_step else None


def format_size(num_bytes: int) -> str:
    """Return a number of bytes in the unit that suits it."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < _KIB:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 10 else f"{size:.1f} {unit}"
        size /= _KIB
    return f"{size:.1f} GiB"


async def _show_bookmarks(
    request: AnyRequest, sessions: SessionReader, frame: PageFrame, session_id: str, step: int | None
) -> Template | Redirect:
    if request.headers.get("hx-request") != "true":
        return _go(f"/s/{session_id}" + (f"?step={step}" if step is not None else ""))
    context = {"session": await sessions.get(session_id), "bookmarks": await sessions.bookmarks(session_id)}
    return frame.render_part("partials/_bookmarks.html", context)


def _go(path: str) -> Redirect:
    return Redirect(path, status_code=303, headers=dict(PAGE_HEADERS))
