"""`/api/requests` and the metrics of a session, for programs."""

from functools import partial
from typing import Any, Final

import msgspec
from litestar import Controller, MediaType, Request, Response, get
from litestar.di import NamedDependency
from litestar.params import FromPath

from app.realtime.hub import EventHub
from app.services.requests import RequestReader
from app.services.sessions import SessionReader
from app.web.chart_context import POINTS, complete_until
from app.web.moments import parse_moment
from app.web.query_values import read_int
from app.web.request_json import describe_life, describe_metrics, describe_request
from app.web.request_query import FILTER_NAMES, check_names, make_cursor, parse_cursor, parse_filter
from engine.errors import RequestError

DEFAULT_LIMIT: Final = 50
MAX_LIMIT: Final = 500
MAX_POINTS: Final = 2000
_NS_PER_S: Final = 1_000_000_000
_NO_STORE: Final = {"Cache-Control": "no-store"}

AnyRequest = Request[Any, Any, Any]


class RequestsApiController(Controller):
    """Recorded requests."""

    path = "/api/requests"
    tags = ("requests",)

    @get("/", operation_id="listRequests", summary="Requests, newest first")
    async def list_requests(
        self, request: AnyRequest, requests: NamedDependency[RequestReader]
    ) -> Response[bytes]:
        """Return one page of the requests that the filters let through; `before` is another page's `next`."""
        query = request.query_params
        check_names(query, (*FILTER_NAMES, "limit", "before"))
        limit = read_int(request, "limit", DEFAULT_LIMIT, 1, MAX_LIMIT)
        found = await requests.list_requests(
            parse_filter(query), limit + 1, parse_cursor(query.get("before"))
        )
        cursor = make_cursor(found[limit - 1]) if len(found) > limit else None
        return _json({"items": [describe_request(facts) for facts in found[:limit]], "next": cursor})

    @get("/{request_id:str}", operation_id="getRequest", summary="One request and its life")
    async def get_request(
        self,
        request_id: FromPath[str],
        request: AnyRequest,
        requests: NamedDependency[RequestReader],
        sessions: NamedDependency[SessionReader],
    ) -> Response[bytes]:
        """Return a request with events, phases, blocks and tokens; `from_step` goes on with a long one."""
        from_step = read_int(request, "from_step", 0)
        life = await requests.life(request_id, from_step or None)
        body = await sessions.call_worker(partial(_encode, partial(describe_life, life)))
        return Response(body, media_type=MediaType.JSON, headers=_NO_STORE)


class MetricsApiController(Controller):
    """Per-second sums of a session."""

    path = "/api/sessions"
    tags = ("sessions",)

    @get("/{session_id:str}/metrics", operation_id="getMetrics", summary="Sums per second for charts")
    async def get_metrics(
        self,
        session_id: FromPath[str],
        request: AnyRequest,
        requests: NamedDependency[RequestReader],
        hub: NamedDependency[EventHub],
    ) -> Response[bytes]:
        """Return the seconds from `since` to `until`, merged into at most `points` spans."""
        query = request.query_params
        check_names(query, ("since", "until", "points"))
        points = read_int(request, "points", POINTS, 2, MAX_POINTS)
        since, until = (_parse_second(query.get(name), name) for name in ("since", "until"))
        if since is not None and until is not None and until <= since:
            raise RequestError("until must be later than since.", param="until")
        metrics = await requests.metrics(session_id, since, until, points)
        is_running = session_id == hub.session_id
        return _json(describe_metrics(session_id, metrics, complete_until(is_running=is_running)))


def _parse_second(text: str | None, name: str) -> int | None:
    return parse_moment(text, name) // _NS_PER_S if text else None


def _encode(describe: partial[dict[str, Any]]) -> bytes:
    return msgspec.json.encode(describe())


def _json(value: dict[str, Any]) -> Response[bytes]:
    return Response(msgspec.json.encode(value), media_type=MediaType.JSON, headers=_NO_STORE)
