"""What every page shows around its own content: navigation, model, theme, whether history is written."""

from dataclasses import dataclass
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
