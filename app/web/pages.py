"""Pages for people: the live view and the parts of it that refresh themselves."""

from typing import Any, Final

from litestar import Controller, Request, get
from litestar.di import NamedDependency
from litestar.response import Redirect, Template

from app.engine_host import EngineHost
from app.realtime.hub import EventHub
from app.settings import Settings
from app.web.decision_context import DecisionLink, list_newest
from app.web.engine_policy import list_allowed
from app.web.live_context import (
    describe_engine,
    describe_reasons,
    describe_states,
    make_panels,
)
from app.web.page_context import PAGE_HEADERS, PageFrame
from app.web.table_context import make_tables
from engine.config import EngineConfig

NEWEST_DECISIONS: Final = 8
"""Preemptions that are listed under the timeline."""

POLICY_WORDS: Final = {
    "policy": "Order of the queue",
    "preemption": "Who gives way when blocks run out",
    "preemption_mode": "What becomes of its blocks",
}
"""What the fields of the form are that changes the policies."""


class PagesController(Controller):
    """`/live` and its parts."""

    path = "/"
    include_in_schema = False

    @get("/", name="home")
    async def home(self) -> Redirect:
        """Send people to the live view."""
        return Redirect("/live", headers=dict(PAGE_HEADERS))

    @get("/live", name="live")
    async def live(
        self,
        request: Request[Any, Any, Any],
        hub: NamedDependency[EventHub],
        host: NamedDependency[EngineHost],
        frame: NamedDependency[PageFrame],
    ) -> Template:
        """Show the engine. Answers while the model loads, and says so."""
        return frame.render_page(
            request,
            "pages/live.html",
            "/live",
            {
                "has_stream": True,
                "parts_path": "/live",
                "session_id": hub.session_id,
                "base_url": str(request.base_url).rstrip("/"),
                "states": describe_states(),
                "reasons": describe_reasons(),
                "panels": make_panels(hub.snapshot, num_watching=hub.num_clients),
                "tables": make_tables(hub.snapshot),
                "engine_info": hub.info,
                "decisions": _newest_decisions(hub),
                "policy_names": _list_policies(hub),
                "allowed_policies": _allowed_policies(hub),
                **describe_engine(host),
            },
        )

    @get("/live/panels", name="live-panels")
    async def panels(
        self,
        request: Request[Any, Any, Any],
        hub: NamedDependency[EventHub],
        settings: NamedDependency[Settings],
    ) -> Template:
        """Return the request list and, for the status bar, the totals."""
        return _render(
            "partials/_panels.html",
            {
                "panels": make_panels(hub.snapshot, num_watching=hub.num_clients),
                "decisions": _newest_decisions(hub),
                "allowed_policies": _allowed_policies(hub),
                "parts_path": "/live",
                "model_name": settings.model_name,
                "base_url": str(request.base_url).rstrip("/"),
            },
        )

    @get("/live/tables", name="live-tables")
    async def tables(self, hub: NamedDependency[EventHub]) -> Template:
        """Return the grid as tables."""
        return _render("partials/_tables.html", {"tables": make_tables(hub.snapshot)})

    @get("/live/policies", name="live-policies")
    async def policies(
        self,
        request: Request[Any, Any, Any],
        hub: NamedDependency[EventHub],
        frame: NamedDependency[PageFrame],
    ) -> Template:
        """Offer other policies in a plain form: what the live view's dialog is, without scripts."""
        context = {
            "policy_names": _list_policies(hub),
            "policies": hub.snapshot.policies if hub.snapshot else None,
        }
        return frame.render_page(request, "pages/policies.html", "/live", context)

    @get("/live/status", name="live-status")
    async def status(self, host: NamedDependency[EngineHost]) -> Template:
        """Return the card that says how far loading is, or why it failed."""
        return _render("partials/_engine_state.html", describe_engine(host))


def _newest_decisions(hub: EventHub) -> list[DecisionLink]:
    return list_newest(hub.decisions.newest_preemptions(NEWEST_DECISIONS))


def _list_policies(hub: EventHub) -> list[tuple[str, str, tuple[str, ...]]]:
    """Return what can be chosen: field, words, names."""
    return [(field, POLICY_WORDS[field], names) for field, names in _allowed_policies(hub).items()]


def _allowed_policies(hub: EventHub) -> dict[str, tuple[str, ...]]:
    return list_allowed(hub.snapshot.config if hub.snapshot else EngineConfig())


def _render(template_name: str, context: dict[str, Any]) -> Template:
    return Template(template_name=template_name, context=context, headers=dict(PAGE_HEADERS))
