"""Pages and drawer contents that say what the scheduler decided in one step, and why."""

from typing import Any

from litestar import Controller, Request, get
from litestar.di import NamedDependency
from litestar.params import FromPath
from litestar.response import Template

from app.errors import HistoryUnavailableError, NotInHistoryError
from app.realtime.hub import EventHub
from app.services.sessions import SessionReader
from app.web.decision_context import make_decisions_view
from app.web.page_context import PageFrame
from app.web.query_values import MAX_INTEGER, parse_int

AnyRequest = Request[Any, Any, Any]


class DecisionPagesController(Controller):
    """`/live/decisions/{step}` and `/s/{session}/decisions/{step}`; htmx gets what goes into the drawer."""

    path = "/"
    include_in_schema = False

    @get("/live/decisions/{step:str}", name="live-decisions")
    async def live(
        self,
        step: FromPath[str],
        request: AnyRequest,
        hub: NamedDependency[EventHub],
        sessions: NamedDependency[SessionReader],
        frame: NamedDependency[PageFrame],
    ) -> Template:
        """Show a step of the running session; a recent one also where nothing is recorded."""
        number = parse_int(step, "step", 1, MAX_INTEGER)
        found = hub.decisions.find(number)
        if found is None:
            context = await _read(sessions, hub.session_id, number, is_part=_is_part(request))
        else:
            context = {"view": make_decisions_view(found), "problem": ""}
        context |= {"base": "/live", "session_id": hub.session_id, "step": number}
        context |= await _read_near(sessions, hub.session_id, number)
        return _render(request, frame, context)

    @get("/s/{session_id:str}/decisions/{step:str}", name="session-decisions")
    async def recorded(
        self,
        session_id: FromPath[str],
        step: FromPath[str],
        request: AnyRequest,
        sessions: NamedDependency[SessionReader],
        frame: NamedDependency[PageFrame],
    ) -> Template:
        """Show a step of a recorded session."""
        number = parse_int(step, "step", 1, MAX_INTEGER)
        context = await _read(sessions, session_id, number, is_part=_is_part(request))
        context |= {"base": f"/s/{session_id}", "session_id": session_id, "step": number}
        context |= await _read_near(sessions, session_id, number)
        return _render(request, frame, context)


def _is_part(request: AnyRequest) -> bool:
    return request.headers.get("hx-request") == "true"


async def _read(sessions: SessionReader, session_id: str, step: int, *, is_part: bool) -> dict[str, Any]:
    """Return a recorded step; in the drawer a problem is told there, elsewhere it is an error page."""
    try:
        found = await sessions.decisions(session_id, step)
    except (NotInHistoryError, HistoryUnavailableError) as error:
        if not is_part:
            raise
        return {"view": None, "problem": str(error)}
    return {"view": make_decisions_view(found), "problem": ""}


async def _read_near(sessions: SessionReader, session_id: str, step: int) -> dict[str, Any]:
    """Return the neighbouring preemptions, as far as they are recorded."""
    try:
        before, after = await sessions.near_preemptions(session_id, step)
    except (NotInHistoryError, HistoryUnavailableError):
        before = after = None
    return {"earlier": before, "later": after}


def _render(request: AnyRequest, frame: PageFrame, context: dict[str, Any]) -> Template:
    if _is_part(request):
        return frame.render_part("partials/_decisions.html", {**context, "in_drawer": True})
    nav_path = "/live" if context["base"] == "/live" else "/sessions"
    return frame.render_page(request, "pages/decisions.html", nav_path, {**context, "in_drawer": False})
