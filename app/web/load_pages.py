"""`/load`: give the engine something to do, and watch how it copes."""

from typing import Any

from litestar import Controller, Request, get, post
from litestar.di import NamedDependency
from litestar.response import Redirect, Template

from app.errors import UnavailableError
from app.load.files import LoadError
from app.services.loads import LoadBusyError, LoadService
from app.web.form_data import read_form
from app.web.load_forms import DEFAULT_VALUES, FIELDS, MAX_FORM_BYTES, SOURCES, LoadForm, read_load_form
from app.web.page_context import PAGE_HEADERS, PageFrame
from engine.errors import QueueFullError

PATH = "/load"
AnyRequest = Request[Any, Any, Any]


class LoadPagesController(Controller):
    """The page, its form, and the part of it that follows the run."""

    path = PATH
    include_in_schema = False
    request_max_body_size = MAX_FORM_BYTES

    @get("/", name="load")
    async def show(
        self, request: AnyRequest, loads: NamedDependency[LoadService], frame: NamedDependency[PageFrame]
    ) -> Template:
        """Show the last run, and the form as it was for that."""
        typed = loads.last_plan.typed if loads.last_plan is not None else {}
        return _render(request, loads, frame, LoadForm({**DEFAULT_VALUES, **typed}, {}, None))

    @get("/run", name="load-run")
    async def show_run(
        self, loads: NamedDependency[LoadService], frame: NamedDependency[PageFrame]
    ) -> Template:
        """Return how the run goes."""
        return frame.render_part("partials/_load_run.html", {"run": loads.describe()})

    @post("/", name="load-start", status_code=200)
    async def start(
        self, request: AnyRequest, loads: NamedDependency[LoadService], frame: NamedDependency[PageFrame]
    ) -> Template | Redirect:
        """Begin a run and lead to the page; what is wrong is said there, and fields keep their values."""
        form = await read_load_form(await read_form(request, file_fields=("file",)), loads.priority_classes)
        status = 422
        if form.plan is not None:
            try:
                await loads.start(form.plan)
            except LoadBusyError as error:
                status, form.errors["form"] = 409, str(error)
            except LoadError as error:
                form.errors["file" if form.values["source"] == "file" else "form"] = str(error)
            except (UnavailableError, QueueFullError) as error:
                status, form.errors["form"] = 503, str(error)
            else:
                return _lead_to_page()
        return _render(request, loads, frame, form, status)

    @post("/stop", name="load-stop", status_code=200)
    async def stop(
        self, request: AnyRequest, loads: NamedDependency[LoadService], frame: NamedDependency[PageFrame]
    ) -> Template | Redirect:
        """End the run; its figures stay."""
        loads.stop("Stopped by hand.")
        if "hx-request" in request.headers:
            return frame.render_part("partials/_load_run.html", {"run": loads.describe()})
        return _lead_to_page()


def _lead_to_page() -> Redirect:
    return Redirect(PATH, status_code=303, headers=dict(PAGE_HEADERS))


def _render(
    request: AnyRequest, loads: LoadService, frame: PageFrame, form: LoadForm, status: int = 200
) -> Template:
    page = frame.render_page(
        request,
        "pages/load.html",
        PATH,
        {
            "form": form,
            "sources": SOURCES,
            "fields": FIELDS,
            "classes": loads.priority_classes,
            "run": loads.describe(),
        },
    )
    page.status_code = status
    return page
