"""Pages of requests: the list with its filter and charts, one request with its life; a session's charts."""

import time
from http import HTTPStatus
from typing import Any, Final

from litestar import Controller, Request, get
from litestar.di import NamedDependency
from litestar.params import FromPath
from litestar.response import Template

from app.errors import HistoryUnavailableError
from app.history.request_info import KINDS
from app.realtime.hub import EventHub
from app.services.request_rows import STATUSES
from app.services.requests import RequestReader
from app.services.sessions import SessionReader
from app.web.chart_context import make_charts
from app.web.page_context import PageFrame
from app.web.query_values import read_int
from app.web.request_context import (
    KIND_WORDS,
    TOKEN_ROWS,
    context_of_row,
    make_life_view,
    make_line,
    make_query,
)
from app.web.request_query import FILTER_NAMES, make_cursor, parse_cursor, parse_filter
from engine.errors import RequestError

PAGE_ROWS: Final = 50
NAV_PATH: Final = "/requests"

AnyRequest = Request[Any, Any, Any]


class RequestPagesController(Controller):
    """`/requests`, `/r/{request}` and the charts of a session."""

    path = "/"
    include_in_schema = False

    @get("/requests", name="requests")
    async def requests_page(
        self,
        request: AnyRequest,
        requests: NamedDependency[RequestReader],
        sessions: NamedDependency[SessionReader],
        hub: NamedDependency[EventHub],
        frame: NamedDependency[PageFrame],
    ) -> Template:
        """List requests, newest first; htmx gets the list alone."""
        context, status = await _list_requests(request, requests)
        if "HX-Request" in request.headers:
            return frame.render_part("partials/_request_list.html", context)
        session = context["values"]["session"].strip() or hub.session_id
        context |= {
            "statuses": STATUSES,
            "kinds": [(kind, KIND_WORDS[kind]) for kind in KINDS],
            "charts": await make_charts(requests, sessions, session, is_running=session == hub.session_id),
        }
        page = frame.render_page(request, "pages/requests.html", NAV_PATH, context)
        page.status_code = status
        return page

    @get("/r/{request_id:str}", name="request")
    async def request_page(
        self,
        request_id: FromPath[str],
        request: AnyRequest,
        requests: NamedDependency[RequestReader],
        frame: NamedDependency[PageFrame],
    ) -> Template:
        """Show one request: life, blocks, texts, tokens; htmx gets the part that changes while it runs."""
        tokens_from = read_int(request, "tokens", 0)
        wanted = read_int(request, "choice", 0)
        life = await requests.life(request_id, read_int(request, "from_step", 0) or None)
        by_index = {choice.index: choice for choice in life.choices}
        if life.choices and wanted not in by_index:
            last = life.choices[-1].index
            raise RequestError(f"choice is {wanted}; this request has 0 to {last}.", param="choice")
        choice = by_index.get(wanted)
        facts = life.request.facts
        context: dict[str, Any] = {
            "whole": life.request,
            "facts": facts,
            "life": life,
            "view": make_life_view(life, choice, tokens_from, time.time_ns()) if choice else None,
            "token_rows_per_page": TOKEN_ROWS,
            **context_of_row(facts),
        }
        if "HX-Request" in request.headers:
            return frame.render_part("partials/_request_life.html", context)
        return frame.render_page(request, "pages/request.html", NAV_PATH, context)

    @get("/s/{session_id:str}/charts", name="session-charts")
    async def charts(
        self,
        session_id: FromPath[str],
        request: AnyRequest,
        requests: NamedDependency[RequestReader],
        sessions: NamedDependency[SessionReader],
        hub: NamedDependency[EventHub],
        frame: NamedDependency[PageFrame],
    ) -> Template:
        """Show a session's numbers per second; htmx gets the charts alone."""
        info = await sessions.facts(session_id)
        charts = await make_charts(requests, sessions, session_id, is_running=session_id == hub.session_id)
        if "HX-Request" in request.headers:
            return frame.render_part("partials/_charts.html", {"charts": charts})
        context = {"charts": charts, "session": info}
        return frame.render_page(request, "pages/charts.html", "/sessions", context)


async def _list_requests(request: AnyRequest, requests: RequestReader) -> tuple[dict[str, Any], int]:
    """Return what the list shows and the status of a page with it; errors are part of both."""
    query = request.query_params
    values = {name: str(query.get(name, "")) for name in FILTER_NAMES}
    before = query.get("before")
    context: dict[str, Any] = {
        "values": values,
        "lines": [],
        "has_sessions": False,
        "next_url": None,
        "first_url": f"/requests?{make_query(values)}",
        "list_url": f"/requests?{make_query(values, **({'before': before} if before else {}))}",
        "is_first_page": not before,
        "is_filtered": any(value.strip() for value in values.values()),
        "problem": "",
        "bad_field": None,
    }
    try:
        found = await requests.list_requests(parse_filter(values), PAGE_ROWS + 1, parse_cursor(before))
    except RequestError as error:
        return {**context, "problem": str(error), "bad_field": error.param}, HTTPStatus.BAD_REQUEST
    except HistoryUnavailableError as error:
        return {**context, "problem": str(error)}, HTTPStatus.SERVICE_UNAVAILABLE
    if len(found) > PAGE_ROWS:
        cursor = make_cursor(found[PAGE_ROWS - 1])
        context["next_url"] = f"/requests?{make_query(values, before=cursor)}"
    context["lines"] = [make_line(facts) for facts in found[:PAGE_ROWS]]
    context["has_sessions"] = len({facts.session_id for facts in found[:PAGE_ROWS]}) > 1
    return context, HTTPStatus.OK
