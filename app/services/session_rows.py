"""Queries on recorded sessions: what there is of them, their chunks and states as they lie in the file."""

from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Select, and_, exists, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.models import BookmarkRow, ChunkRow, KeyframeRow, RequestEventRow, RequestRow, SessionRow
from app.errors import NotInHistoryError
from app.history.step_log import CHUNK_STEPS
from engine.config import EngineConfig
from engine.engine_info import EngineInfo

MAX_MARKERS = 10_000

_MARKER_OF_EVENT = {
    "preempted": "preempt",
    "finished": "finish",
    "rejected": "reject",
    "reset": "reset",
    "policies": "policies",
}


class SessionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One server run. Times are Unix nanoseconds; `status`: running, stopped, interrupted.

    States are known after steps `first_step` - 1 to `last_step`, less those in gaps. `engine` says how the
    model was run, None until it is loaded and where that was not recorded. `config` has the defaults of this
    version for what the one that recorded it did not know; `recorded_config` has what was recorded, no more.
    """

    id: str
    status: str
    started_ns: int
    ended_ns: int | None
    model: str
    version: str
    first_step: int
    last_step: int
    num_lost_steps: int
    records_text: bool
    is_starred: bool
    note: str
    config: EngineConfig | None
    recorded_config: dict[str, Any] | None
    engine: EngineInfo | None
    num_requests: int = 0
    num_bytes: int = 0

    @property
    def is_running(self) -> bool:
        """Whether more steps may come."""
        return self.ended_ns is None


class Gap(msgspec.Struct, frozen=True):
    """Steps `first_step` to `first_step + num_steps - 1` were lost by the recorder."""

    first_step: int
    num_steps: int

    @property
    def last_step(self) -> int:
        """The newest lost step; the state after it is known."""
        return self.first_step + self.num_steps - 1


class Bookmark(msgspec.Struct, frozen=True, kw_only=True):
    """A step that somebody marked; `created_ns` in Unix nanoseconds."""

    id: str
    step: int
    note: str
    created_ns: int


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """A step worth jumping to. `kind`: preempt, finish, abort, reject, reset, policies, gap, bookmark.

    `note`: of a preemption its mode, of an end its reason, of a change of policies those in force from there
    on, of a bookmark what somebody wrote.
    """

    step: int
    kind: str
    request_id: str | None = None
    note: str = ""


# ---------------------------------------------------------------- sessions


async def read_session(db: AsyncSession, session_id: str) -> SessionInfo:
    """Return a session without its sums; raises `NotInHistoryError`."""
    row = await db.get(SessionRow, session_id)
    if row is None:
        raise NotInHistoryError(f"No session {session_id!r} is recorded.")
    return _make_info(row)


async def read_whole_session(db: AsyncSession, session_id: str) -> SessionInfo:
    """Return a session; raises `NotInHistoryError`."""
    found = (await db.execute(_select_with_sums().where(SessionRow.id == session_id))).first()
    if found is None:
        raise NotInHistoryError(f"No session {session_id!r} is recorded.")
    row, *sums = found
    return _make_info(row, *sums)


async def read_sessions(
    db: AsyncSession, limit: int, before: tuple[int, str] | None = None
) -> list[SessionInfo]:
    """Return the newest sessions, or the newest that are older than `before` (start in ns, id)."""
    query = _select_with_sums().order_by(SessionRow.started_ns.desc(), SessionRow.id.desc()).limit(limit)
    if before is not None:
        started_ns, session_id = before
        query = query.where(
            or_(
                SessionRow.started_ns < started_ns,
                and_(SessionRow.started_ns == started_ns, SessionRow.id < session_id),
            )
        )
    return [_make_info(row, *sums) for row, *sums in await db.execute(query)]


def _select_with_sums() -> "Select[SessionRow, int, int, int]":
    requests = select(func.count()).where(RequestRow.session_id == SessionRow.id)
    chunks = select(func.coalesce(func.sum(func.length(ChunkRow.records)), 0)).where(
        ChunkRow.session_id == SessionRow.id
    )
    keyframes = select(func.coalesce(func.sum(func.length(KeyframeRow.state)), 0)).where(
        KeyframeRow.session_id == SessionRow.id
    )
    return select(
        SessionRow, requests.scalar_subquery(), chunks.scalar_subquery(), keyframes.scalar_subquery()
    )


def _make_info(
    row: SessionRow, num_requests: int = 0, chunk_bytes: int = 0, keyframe_bytes: int = 0
) -> SessionInfo:
    return SessionInfo(
        id=row.id,
        status="running" if row.ended_ns is None else row.ended_how or "stopped",
        started_ns=row.started_ns,
        ended_ns=row.ended_ns,
        model=row.model_name,
        version=row.version,
        first_step=row.first_step,
        last_step=row.last_step,
        num_lost_steps=row.num_lost_steps,
        records_text=row.records_text,
        is_starred=row.is_starred,
        note=row.note,
        config=msgspec.json.decode(row.config, type=EngineConfig) if row.config else None,
        recorded_config=msgspec.json.decode(row.config) if row.config else None,
        engine=msgspec.json.decode(row.engine, type=EngineInfo) if row.engine else None,
        num_requests=num_requests,
        num_bytes=chunk_bytes + keyframe_bytes,
    )


# ---------------------------------------------------------------- steps


async def read_chunks(db: AsyncSession, session_id: str, first: int, last: int, limit: int) -> list[bytes]:
    """Return the first `limit` rows of records that hold any of the steps `first` to `last`, in order."""
    query = (
        select(ChunkRow.records)
        .where(
            ChunkRow.session_id == session_id,
            ChunkRow.first_step.between(first - CHUNK_STEPS + 1, last),
            ChunkRow.first_step + ChunkRow.num_steps > first,
        )
        .order_by(ChunkRow.first_step)
        .limit(limit)
    )
    return list(await db.scalars(query))


async def read_newest_state(db: AsyncSession, session_id: str, step: int) -> tuple[int, bytes] | None:
    """Return the newest stored state after `step` or an earlier one, and its step."""
    query = (
        select(KeyframeRow.step, KeyframeRow.state)
        .where(KeyframeRow.session_id == session_id, KeyframeRow.step <= step)
        .order_by(KeyframeRow.step.desc())
        .limit(1)
    )
    found = (await db.execute(query)).first()
    return (found[0], found[1]) if found is not None else None


async def read_bases(db: AsyncSession, session_id: str, first: int, last: int) -> dict[int, bytes]:
    """Return the states with which readable steps begin again, after the steps `first` to `last`."""
    query = select(KeyframeRow.step, KeyframeRow.state).where(
        KeyframeRow.session_id == session_id, KeyframeRow.is_base, KeyframeRow.step.between(first, last)
    )
    return {found.step: found.state for found in await db.execute(query)}


async def read_gaps(db: AsyncSession, info: SessionInfo) -> list[Gap]:
    """Return what is missing between the session's first and last step, in order."""
    query = (
        select(ChunkRow.first_step, ChunkRow.num_steps)
        .where(ChunkRow.session_id == info.id)
        .order_by(ChunkRow.first_step)
    )
    gaps = []
    following = info.first_step
    for first_step, num_steps in await db.execute(query):
        if first_step > following:
            gaps.append(Gap(following, first_step - following))
        following = max(following, first_step + num_steps)
    if following <= info.last_step:
        gaps.append(Gap(following, info.last_step + 1 - following))
    return gaps


# ---------------------------------------------------------------- markers


async def read_near_preemptions(
    db: AsyncSession, info: SessionInfo, step: int
) -> tuple[int | None, int | None]:
    """Return the last recorded step with a preemption before `step` and the first one after it."""
    column = RequestEventRow.step
    in_order = (
        select(column)
        .where(
            RequestEventRow.session_id == info.id,
            RequestEventRow.kind == "preempted",
            column >= info.first_step,
            _is_in_chunk(),
        )
        .limit(1)
    )
    before = await db.scalar(in_order.where(column < step).order_by(column.desc()))
    after = await db.scalar(in_order.where(column > step).order_by(column))
    return before, after


async def read_bookmarks(db: AsyncSession, session_id: str) -> list[Bookmark]:
    """Return a session's bookmarks by step."""
    query = (
        select(BookmarkRow)
        .where(BookmarkRow.session_id == session_id)
        .order_by(BookmarkRow.step, BookmarkRow.created_ns)
    )
    return [
        Bookmark(id=row.id, step=row.step, note=row.note, created_ns=row.created_ns)
        for row in await db.scalars(query)
    ]


async def read_markers(db: AsyncSession, info: SessionInfo, after: int) -> tuple[list[Marker], bool]:
    """Return the first markers of steps later than `after`, by step, and whether there are more.

    What happened in a gap, or before the first step that is left, is left out: it cannot be shown.
    """
    gaps = await read_gaps(db, info)
    markers = [
        Marker(step=gap.first_step, kind="gap", note=f"{gap.num_steps} steps were lost")
        for gap in gaps
        if gap.first_step > after
    ]
    markers += [
        Marker(step=bookmark.step, kind="bookmark", note=bookmark.note)
        for bookmark in await read_bookmarks(db, info.id)
        if bookmark.step > max(after, info.first_step - 2)
    ]
    markers += [
        _make_marker(step, kind, request_id, detail)
        for step, kind, request_id, detail in await db.execute(
            _select_events(info, after, may_lack_steps=bool(gaps))
        )
    ]
    markers.sort(key=lambda marker: marker.step)
    return markers[:MAX_MARKERS], len(markers) > MAX_MARKERS


def _select_events(info: SessionInfo, after: int, *, may_lack_steps: bool) -> "Select[int, str, str, str]":
    is_kept: ColumnElement[bool] = RequestEventRow.step >= info.first_step - 1
    if may_lack_steps:
        is_kept = and_(is_kept, _can_be_shown(info))
    return (
        select(RequestEventRow.step, RequestEventRow.kind, RequestEventRow.request_id, RequestEventRow.detail)
        .where(
            RequestEventRow.session_id == info.id,
            RequestEventRow.step > after,
            is_kept,
            RequestEventRow.kind.in_(_MARKER_OF_EVENT),
        )
        .order_by(RequestEventRow.step, RequestEventRow.seq)
        .limit(MAX_MARKERS + 1)
    )


def _can_be_shown(info: SessionInfo) -> ColumnElement[bool]:
    """Whether the state after an event's step is there: in a row of records, or as the end of a gap."""
    step = RequestEventRow.step
    return or_(_is_in_chunk(), exists().where(KeyframeRow.session_id == info.id, KeyframeRow.step == step))


def _is_in_chunk() -> ColumnElement[bool]:
    """Whether an event's step is in a row of records."""
    step = RequestEventRow.step
    return exists().where(
        ChunkRow.session_id == RequestEventRow.session_id,
        ChunkRow.first_step.between(step - CHUNK_STEPS + 1, step),
        ChunkRow.first_step + ChunkRow.num_steps > step,
    )


def _make_marker(step: int, kind: str, request_id: str, detail: str) -> Marker:
    facts: dict[str, Any] = msgspec.json.decode(detail)
    marker = _MARKER_OF_EVENT[kind]
    if marker == "policies":
        return Marker(step=step, kind=marker, note=", ".join(facts.values()))
    if marker == "finish" and facts.get("reason") == "abort":
        marker = "abort"
    note = facts.get("reason") or facts.get("code") or facts.get("error") or facts.get("mode") or ""
    return Marker(step=step, kind=marker, request_id=request_id or None, note=str(note))
