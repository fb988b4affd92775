"""What every page shows around its own content: navigation, model, theme, whether history is written."""

from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import msgspec
from litestar import Request
from litestar.response import Template

from app.db.writer import HistoryWriter
from app.engine_host import EngineHost
from app.history.recorder import Recorder
from app.settings import Settings
from app.web.templating import THEMES, theme_of

NAV: Final = (
    ("Live", "/live"),
    ("Chat", "/chat"),
    ("Sessions", "/sessions"),
    ("Requests", "/requests"),
    ("Load", "/load"),
)

HOME: Final = "/live"

_NOTHING_HERE: Final = "The address leads nowhere; perhaps it was mistyped."
_ERROR_TITLES: Final = {
    400: "A value does not fit",
    403: "Not allowed",
    404: "There is no such page",
    405: "That does not work here",
    500: "Something went wrong in the server",
    503: "Not available right now",
}
_ERROR_HINTS: Final = {
    400: "Correct it in the address or the form, and try again.",
    500: "The server goes on; its log says what happened.",
    503: "Try again in a moment.",
}
_LISTS: Final = {
    "/s/": ("All sessions", "/sessions"),
    "/r/": ("All requests", "/requests"),
    "/chat/": ("All chats", "/chat"),
}
"""Where to look for what an address below these did not find."""

PAGE_HEADERS: Final = {"Vary": "HX-Request", "Cache-Control": "no-store"}
"""A page shows one moment; the same address may answer a whole page or a part of it."""


class RecordingView(msgspec.Struct, frozen=True, kw_only=True):
    """What the line under the navigation says of the history."""

    state: str
    reason: str
    num_lost_steps: int
    num_lost_writes: int
    num_queued: int
    is_text_on: bool

    @property
    def num_lost(self) -> int:
        """All losses."""
        return self.num_lost_steps + self.num_lost_writes

    @property
    def is_well(self) -> bool:
        """Whether everything is recorded that is to be."""
        return self.state not in {"failing", "off"} and not self.num_lost


@dataclass(frozen=True)
class PageFrame:
    """Renders pages and parts of them; injected as `frame`."""

    settings: Settings
    host: EngineHost
    writer: HistoryWriter
    recorder: Recorder

    def render_page(
        self, request: Request[Any, Any, Any], name: str, current_path: str, context: dict[str, Any]
    ) -> Template:
        """Return a whole page (a template that extends `layout.html`); `current_path` is its entry in NAV."""
        frame: dict[str, Any] = {
            "theme": theme_of(request),
            "themes": THEMES,
            "nav": NAV,
            "current_path": current_path,
            "has_stream": False,
            "model_name": self.settings.model_name,
            "engine_status": str(self.host.status),
            "recording": self.describe_recording(),
            "here": _describe_address(request),
        }
        return self.render_part(name, {**frame, **context})

    def render_error(
        self,
        request: Request[Any, Any, Any],
        status: int,
        message: str,
        links: Sequence[tuple[str, str]] = (),
    ) -> Template:
        """Return the page for an error that a person runs into; `message` says what to do.

        An address that nothing answers to has no message but the status's own phrase. `links` are names and
        paths of what there is instead.
        """
        path = str(request.scope["path"])
        lists = [link for prefix, link in _LISTS.items() if path.startswith(prefix)]
        context = {
            "status": status,
            "title": _ERROR_TITLES.get(status, "That did not work"),
            "message": _NOTHING_HERE if message == HTTPStatus.NOT_FOUND.phrase else message,
            "hint": _ERROR_HINTS.get(status, ""),
            "links": [*links, *lists, ("Live view", HOME)],
            "here": HOME,  # forms of the frame lead back to a page that works
        }
        page = self.render_page(request, "errors/error.html", "", context)
        page.status_code = status
        return page

    def render_part(self, name: str, context: dict[str, Any]) -> Template:
        """Return a part of a page."""
        return Template(template_name=name, context=context, headers=dict(PAGE_HEADERS))

    def describe_recording(self) -> RecordingView:
        """Return how recording goes."""
        status = self.writer.status
        state, reason = status.state, status.reason
        if self.recorder.has_failed:
            state, reason = "off", "Recording has failed; the log says why. The engine goes on."
        return RecordingView(
            state=state,
            reason=reason,
            num_lost_steps=status.num_lost_steps,
            num_lost_writes=status.num_lost_writes,
            num_queued=status.num_queued,
            is_text_on=self.recorder.text.is_on,
        )


def _describe_address(request: Request[Any, Any, Any]) -> str:
    """Return path and query of the page, for forms that lead back to it."""
    return f"{request.url.path}?{request.url.query}" if request.url.query else request.url.path
