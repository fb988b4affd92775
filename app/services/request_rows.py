"""Queries on recorded requests: a page of them, one with its texts and events. Times are Unix ns."""

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, and_, exists, func, literal, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.models import RequestEventRow, RequestRow, RequestTextRow, SessionRow
from app.errors import NotInHistoryError

_ESCAPE = "\\"


class RequestFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which requests are wanted; everything that is set must hold.

    `text`: beginning of the id (also of the part after its prefix), or any text of prompt or answer.
    `since_ns` <= arrival < `until_ns`. `min_tokens`: prompt and answer together.
    """

    statuses: tuple[str, ...] = ()
    session: str | None = None
    kind: str | None = None
    text: str = ""
    since_ns: int | None = None
    until_ns: int | None = None
    min_tokens: int = 0
    min_preemptions: int = 0


class RequestFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One request; fields as in `RequestRow`, `params` decoded."""

    id: str
    session_id: str
    conversation_id: str | None
    kind: str
    status: str
    arrived_ns: int
    admitted_ns: int | None
    first_token_ns: int | None
    ended_ns: int | None
    arrived_step: int
    admitted_step: int | None
    first_token_step: int | None
    ended_step: int | None
    num_choices: int
    max_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_recomputed_tokens: int
    finish_reason: str | None
    error_code: str | None
    params: dict[str, Any]
    priority: int

    @property
    def is_open(self) -> bool:
        """Whether more is to come."""
        return self.status in OPEN_STATUSES


OPEN_STATUSES = ("waiting", "running")
STATUSES = (*OPEN_STATUSES, "finished", "aborted", "failed", "rejected", "interrupted")


class RequestEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One moment in the life of one choice."""

    choice_index: int
    seq_id: int
    step: int
    t_ns: int
    kind: str
    detail: dict[str, Any]


class RequestTexts(msgspec.Struct, frozen=True, kw_only=True):
    """Either `messages` or `prompts`; `outputs` are None while the request is open."""

    messages: list[dict[str, str]] | None
    prompts: list[str | list[int]] | None
    outputs: list[str] | None


class WholeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request with all that the database has of it; `records_text` is that of its session."""

    facts: RequestFacts
    events: list[RequestEvent]
    texts: RequestTexts | None
    records_text: bool
    model_name: str


async def read_requests(
    db: AsyncSession,
    wanted: RequestFilter,
    limit: int,
    before: tuple[int, str] | None = None,
    long_ids: Sequence[str] = (),
) -> list[RequestFacts]:
    """Return the newest requests, or the newest that are older than `before` (arrival in ns, id).

    `long_ids`: open requests that have `wanted.min_tokens` by now, which their rows do not know yet.
    """
    query = select(RequestRow).order_by(RequestRow.arrived_ns.desc(), RequestRow.id.desc()).limit(limit)
    conditions = _make_conditions(wanted, long_ids)
    if before is not None:
        arrived_ns, request_id = before
        conditions.append(
            or_(
                RequestRow.arrived_ns < arrived_ns,
                and_(RequestRow.arrived_ns == arrived_ns, RequestRow.id < request_id),
            )
        )
    return [make_facts(row) for row in await db.scalars(query.where(*conditions))]


async def read_request(db: AsyncSession, request_id: str) -> WholeRequest:
    """Return one request; raises `NotInHistoryError`."""
    row = await db.get(RequestRow, request_id)
    if row is None:
        raise NotInHistoryError(f"No request {request_id[:80]!r} is recorded.")
    text = await db.get(RequestTextRow, request_id)
    session = await db.get(SessionRow, row.session_id)
    query = (
        select(RequestEventRow).where(RequestEventRow.request_id == request_id).order_by(RequestEventRow.seq)
    )
    return WholeRequest(
        facts=make_facts(row),
        events=[_make_event(event) for event in await db.scalars(query)],
        texts=_make_texts(text) if text is not None else None,
        records_text=session is not None and session.records_text,
        model_name=session.model_name if session is not None else "",
    )


def make_facts(row: RequestRow) -> RequestFacts:
    """Return a row as plain data."""
    values = {name: getattr(row, name) for name in RequestFacts.__struct_fields__ if name != "params"}
    return RequestFacts(params=msgspec.json.decode(row.params), **values)


def _make_event(row: RequestEventRow) -> RequestEvent:
    return RequestEvent(
        choice_index=row.choice_index,
        seq_id=row.seq_id,
        step=row.step,
        t_ns=row.t_ns,
        kind=row.kind,
        detail=msgspec.json.decode(row.detail),
    )


def _make_texts(row: RequestTextRow) -> RequestTexts:
    prompt = msgspec.json.decode(row.prompt)
    return RequestTexts(
        messages=prompt.get("messages"),
        prompts=prompt.get("prompts"),
        outputs=msgspec.json.decode(row.outputs) if row.outputs is not None else None,
    )


def _make_conditions(wanted: RequestFilter, long_ids: Sequence[str]) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    if wanted.statuses:
        conditions.append(RequestRow.status.in_(wanted.statuses))
    if wanted.session is not None:
        conditions.append(RequestRow.session_id == wanted.session)
    if wanted.kind is not None:
        conditions.append(RequestRow.kind == wanted.kind)
    if wanted.since_ns is not None:
        conditions.append(RequestRow.arrived_ns >= wanted.since_ns)
    if wanted.until_ns is not None:
        conditions.append(RequestRow.arrived_ns < wanted.until_ns)
    if wanted.min_tokens:
        num_tokens = RequestRow.num_prompt_tokens + RequestRow.num_output_tokens
        conditions.append(or_(num_tokens >= wanted.min_tokens, RequestRow.id.in_(long_ids)))
    if wanted.min_preemptions:
        conditions.append(RequestRow.num_preemptions >= wanted.min_preemptions)
    if wanted.text:
        conditions.append(_contains(wanted.text))
    return conditions


def _contains(text: str) -> ColumnElement[bool]:
    """Whether a request's id begins with `text`, or its prompt or answer has it; ASCII case is ignored."""
    pattern = text.replace(_ESCAPE, _ESCAPE * 2).replace("%", f"{_ESCAPE}%").replace("_", f"{_ESCAPE}_")
    is_id = or_(
        RequestRow.id.like(f"{pattern}%", escape=_ESCAPE),
        RequestRow.id.like(f"%-{pattern}%", escape=_ESCAPE),
    )
    in_prompt = _has_text(RequestTextRow.prompt, f"%{pattern}%")
    in_outputs = _has_text(RequestTextRow.outputs, f"%{pattern}%")
    has_text = exists().where(RequestTextRow.request_id == RequestRow.id, or_(in_prompt, in_outputs))
    return or_(is_id, has_text)


def _has_text(column: Any, pattern: str) -> ColumnElement[bool]:
    """Whether a text in a JSON document is like `pattern`; the roles of messages do not count."""
    tree = func.json_tree(column).table_valued("key", "atom", "type")
    is_text = and_(tree.c.type == literal("text"), tree.c.key.is_distinct_from("role"))
    return exists(select(1).select_from(tree).where(is_text, tree.c.atom.like(pattern, escape=_ESCAPE)))
