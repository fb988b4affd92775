"""Filters of request lists as a query says them; an error names the parameter and what it may be."""

from collections.abc import Mapping
from typing import Any, Final

from litestar.datastructures import MultiDict

from app.history.request_info import KINDS
from app.services.request_rows import STATUSES, RequestFacts, RequestFilter
from app.web.moments import parse_moment
from app.web.query_values import parse_int
from engine.errors import RequestError

FILTER_NAMES: Final = ("status", "session", "kind", "q", "since", "until", "min_tokens", "min_preemptions")
MAX_TEXT_CHARS: Final = 200
_MAX_CURSOR_CHARS: Final = 200


def parse_filter(query: Mapping[str, str]) -> RequestFilter:
    """Return what a query asks for; empty values ask for nothing. Raises `RequestError`."""
    values = {name: query[name].strip() for name in FILTER_NAMES if query.get(name, "").strip()}
    text = values.get("q", "")
    if len(text) > MAX_TEXT_CHARS:
        raise RequestError(f"q has {len(text)} characters; allowed: {MAX_TEXT_CHARS}.", param="q")
    if "\0" in text:
        raise RequestError("q has a zero byte, which nothing can be searched for; leave it out.", param="q")
    since_ns, until_ns = (
        parse_moment(values[name], name) if name in values else None for name in ("since", "until")
    )
    if since_ns is not None and until_ns is not None and until_ns <= since_ns:
        raise RequestError("until must be later than since.", param="until")
    return RequestFilter(
        statuses=_parse_statuses(values.get("status", "")),
        session=values.get("session"),
        kind=_parse_kind(values.get("kind")),
        text=text,
        since_ns=since_ns,
        until_ns=until_ns,
        min_tokens=_parse_least(values, "min_tokens"),
        min_preemptions=_parse_least(values, "min_preemptions"),
    )


def parse_cursor(text: str | None) -> tuple[int, str] | None:
    """Return where a page of a list begins, from the `next` of the page before."""
    if not text:
        return None
    digits, _, request_id = text.partition(".")
    is_sound = digits.isascii() and digits.isdigit() and request_id and len(text) <= _MAX_CURSOR_CHARS
    if not is_sound or int(digits) >= 2**63:
        raise RequestError("before must be the `next` of another page of the list.", param="before")
    return int(digits), request_id


def make_cursor(facts: RequestFacts) -> str:
    """Return what the next page begins with."""
    return f"{facts.arrived_ns}.{facts.id}"


def check_names(query: MultiDict[Any], allowed: tuple[str, ...]) -> None:
    """Refuse parameters that nobody knows or that come twice: a filter must not be passed over."""
    unknown = sorted(set(query) - set(allowed))
    if unknown:
        raise RequestError(
            f"{unknown[0][:40]!r} is no parameter; there are {', '.join(allowed)}.", param=unknown[0][:40]
        )
    for name in allowed:
        if len(query.getall(name, [])) > 1:
            raise RequestError(f"{name} is there more than once; allowed: one.", param=name)


def _parse_statuses(text: str) -> tuple[str, ...]:
    statuses = tuple(part.strip() for part in text.split(",") if part.strip())
    for status in statuses:
        if status not in STATUSES:
            raise RequestError(f"status is {status[:40]!r}; allowed: {', '.join(STATUSES)}.", param="status")
    return statuses


def _parse_least(values: Mapping[str, str], name: str) -> int:
    return parse_int(values[name], name) if name in values else 0


def _parse_kind(text: str | None) -> str | None:
    if text is not None and text not in KINDS:
        raise RequestError(f"kind is {text[:40]!r}; allowed: {', '.join(KINDS)}.", param="kind")
    return text
