"""The line that says what is not recorded, and the switch for texts."""

import logging
from typing import Any

from litestar import Controller, Request, get, post
from litestar.di import NamedDependency
from litestar.response import Redirect, Template

from app.history.recorder import Recorder
from app.web.form_data import find_way_back, read_form
from app.web.page_context import HOME, PAGE_HEADERS, PageFrame
from engine.errors import RequestError

logger = logging.getLogger(__name__)

MAX_FORM_BYTES = 16 * 1024


class RecordingController(Controller):
    """`/recording`: refreshes itself on every page."""

    path = "/recording"
    include_in_schema = False

    @get("/", name="recording")
    async def show(self, frame: NamedDependency[PageFrame]) -> Template:
        """Return the line and the switch."""
        return _render(frame)

    @post("/text", name="recording-text", status_code=200, request_max_body_size=MAX_FORM_BYTES)
    async def switch_text(
        self,
        request: Request[Any, Any, Any],
        recorder: NamedDependency[Recorder],
        frame: NamedDependency[PageFrame],
    ) -> Template | Redirect:
        """Keep prompts, answers and token ids from now on, or no longer.

        Answers htmx with the line and the switch, and a form without scripts by leading back.
        """
        form = await read_form(request)
        wanted = form.get("text")
        if wanted not in {"on", "off"}:
            raise RequestError("text must be on or off.", param="text", code="invalid_value")
        if recorder.text.is_on != (wanted == "on"):
            recorder.switch_text(is_on=wanted == "on")
            logger.info("Recording of texts was switched %s", wanted)
        if "hx-request" in request.headers:
            return _render(frame)
        return Redirect(find_way_back(form.get("back"), HOME), status_code=303, headers=dict(PAGE_HEADERS))


def _render(frame: PageFrame) -> Template:
    return frame.render_part(
        "partials/_recording_update.html", {"recording": frame.describe_recording(), "here": HOME}
    )
