"""`/api/sessions`: recorded server runs, their steps and the engine's state after each, for programs."""

import hashlib
import json
from functools import partial
from typing import Any, TypeVar

import msgspec
from litestar import Controller, MediaType, Request, Response, delete, get, patch, post
from litestar.di import NamedDependency
from litestar.params import FromPath

from app.history.step_log import CHUNK_STEPS
from app.services.session_edits import SessionEditor
from app.services.session_rows import Bookmark, Gap, Marker, SessionInfo
from app.services.sessions import ChunkFrames, SessionReader
from app.web.moments import to_rfc3339
from app.web.query_values import MAX_INTEGER, parse_int, read_flag, read_int
from engine.errors import RequestError
from engine.records import StepRecord
from engine.snapshot import EngineSnapshot

DEFAULT_LIMIT = 50
MAX_LIMIT = 200
MAX_BODY_BYTES = 64 * 1024

_MAX_CURSOR_DIGITS = 19
"""Nanoseconds of Unix time have 19 digits until 2286."""

NO_STORE = {"Cache-Control": "no-store"}
FOR_EVER = "private, max-age=31536000, immutable"

T = TypeVar("T")
AnyRequest = Request[Any, Any, Any]


class BookmarkBody(msgspec.Struct, forbid_unknown_fields=True):
    """A bookmark to be made."""

    step: int
    note: str = ""


class SessionBody(msgspec.Struct, forbid_unknown_fields=True):
    """What is to be changed about a session."""

    note: str | None = None
    is_starred: bool | None = None


class SessionsApiController(Controller):
    """Recorded sessions."""

    path = "/api/sessions"
    tags = ("sessions",)
    request_max_body_size = MAX_BODY_BYTES

    @get("/", operation_id="listSessions", summary="Recorded sessions, newest first")
    async def list_sessions(
        self, request: AnyRequest, sessions: NamedDependency[SessionReader]
    ) -> Response[bytes]:
        """Return one page; `before` is the `next` of the page before."""
        limit = read_int(request, "limit", DEFAULT_LIMIT, 1, MAX_LIMIT)
        infos = await sessions.list_sessions(limit + 1, parse_cursor(request.query_params.get("before")))
        cursor = make_cursor(infos[limit - 1]) if len(infos) > limit else None
        return _json({"items": [describe(info) for info in infos[:limit]], "next": cursor})

    @get("/{session_id:str}", operation_id="getSession", summary="One recorded session")
    async def get_session(
        self, session_id: FromPath[str], sessions: NamedDependency[SessionReader]
    ) -> Response[bytes]:
        """Return a session with its configuration, gaps and bookmarks."""
        return _json(await _describe_whole(sessions, await sessions.get(session_id)))

    @get("/{session_id:str}/state", operation_id="getSessionState", summary="The state after one step")
    async def get_state(
        self, session_id: FromPath[str], request: AnyRequest, sessions: NamedDependency[SessionReader]
    ) -> Response[bytes]:
        """Return what `/api/engine/state` said after step `step`, by default the last one."""
        step = read_int(request, "step", -1)
        with_blocks = read_flag(request, "blocks", default=True)
        snapshot = await sessions.snapshot_at(session_id, step if step >= 0 else None)
        info = await sessions.facts(session_id)
        facts = {
            "status": "ready",
            "session": session_id,
            "model": info.model,
            "progress": None,
            "engine": msgspec.to_builtins(info.engine),
        }
        encode = partial(_encode_state, snapshot, facts, info.recorded_config, with_blocks=with_blocks)
        body = await sessions.call_worker(encode)
        return Response(body, media_type=MediaType.JSON, headers=NO_STORE)

    @get("/{session_id:str}/chunks/{first_step:str}", operation_id="getChunk", summary="256 steps as frames")
    async def get_chunk(
        self,
        session_id: FromPath[str],
        first_step: FromPath[str],
        request: AnyRequest,
        sessions: NamedDependency[SessionReader],
    ) -> Response[bytes]:
        """Return the frames of the live view (docs/wire.md), or with `format=records` whole step records."""
        first = parse_int(first_step, "first_step", 0, MAX_INTEGER)
        form = request.query_params.get("format", "frames")
        if form == "records":
            info = await sessions.facts(session_id)
            last = sessions.check_chunk(info, first)
            records = await sessions.records(session_id, first, last)
            body = await sessions.call_worker(partial(_encode_records, records))
            return Response(body, media_type=MediaType.JSON, headers=NO_STORE)
        if form != "frames":
            raise RequestError(f"format is {form[:40]!r}; allowed: frames, records.", param="format")
        return _answer_frames(request, await sessions.chunk_frames(session_id, first))

    @get("/{session_id:str}/markers", operation_id="getMarkers", summary="Steps worth jumping to")
    async def get_markers(
        self, session_id: FromPath[str], request: AnyRequest, sessions: NamedDependency[SessionReader]
    ) -> Response[bytes]:
        """Return the first markers later than step `after`, by step."""
        markers, is_truncated = await sessions.markers(session_id, read_int(request, "after", -1))
        return _json({"items": [_describe_marker(marker) for marker in markers], "truncated": is_truncated})

    # ---------------------------------------------------------------- changes

    @patch("/{session_id:str}", operation_id="changeSession", summary="Set note or star")
    async def change_session(
        self,
        session_id: FromPath[str],
        request: AnyRequest,
        sessions: NamedDependency[SessionReader],
        session_edits: NamedDependency[SessionEditor],
    ) -> Response[bytes]:
        """Change what the body names and return the session."""
        body = await _read_body(request, SessionBody)
        info = await session_edits.change(session_id, note=body.note, is_starred=body.is_starred)
        return _json(await _describe_whole(sessions, info))

    @delete("/{session_id:str}", operation_id="deleteSession", summary="Delete a session")
    async def delete_session(
        self, session_id: FromPath[str], session_edits: NamedDependency[SessionEditor]
    ) -> None:
        """Delete a session that has ended, with everything recorded of it."""
        await session_edits.delete(session_id)

    @post("/{session_id:str}/bookmarks", operation_id="addBookmark", summary="Mark a step")
    async def add_bookmark(
        self,
        session_id: FromPath[str],
        request: AnyRequest,
        session_edits: NamedDependency[SessionEditor],
    ) -> Response[bytes]:
        """Make a bookmark and return it."""
        body = await _read_body(request, BookmarkBody)
        bookmark = await session_edits.add_bookmark(session_id, body.step, body.note)
        return _json(_describe_bookmark(bookmark), status_code=201)

    @delete(
        "/{session_id:str}/bookmarks/{bookmark_id:str}",
        operation_id="deleteBookmark",
        summary="Take a bookmark away",
    )
    async def delete_bookmark(
        self,
        session_id: FromPath[str],
        bookmark_id: FromPath[str],
        session_edits: NamedDependency[SessionEditor],
    ) -> None:
        """Delete a bookmark."""
        await session_edits.delete_bookmark(session_id, bookmark_id)


# ---------------------------------------------------------------- descriptions


def describe(info: SessionInfo) -> dict[str, Any]:
    """Return a session as a row of the list."""
    return {
        "id": info.id,
        "status": info.status,
        "started": to_rfc3339(info.started_ns),
        "ended": to_rfc3339(info.ended_ns) if info.ended_ns is not None else None,
        "model": info.model,
        "version": info.version,
        "first_step": info.first_step,
        "last_step": info.last_step,
        "num_requests": info.num_requests,
        "num_bytes": info.num_bytes,
        "num_lost_steps": info.num_lost_steps,
        "records_text": info.records_text,
        "is_starred": info.is_starred,
        "note": info.note,
    }


async def _describe_whole(sessions: SessionReader, info: SessionInfo) -> dict[str, Any]:
    gaps = await sessions.gaps(info)
    bookmarks = await sessions.bookmarks(info.id)
    return {
        **describe(info),
        "config": info.recorded_config,
        "engine": msgspec.to_builtins(info.engine),
        "chunk_steps": CHUNK_STEPS,
        "gaps": [_describe_gap(gap) for gap in gaps],
        "bookmarks": [_describe_bookmark(bookmark) for bookmark in bookmarks],
    }


def _describe_gap(gap: Gap) -> dict[str, int]:
    return {"first_step": gap.first_step, "num_steps": gap.num_steps}


def _describe_bookmark(bookmark: Bookmark) -> dict[str, Any]:
    created = to_rfc3339(bookmark.created_ns)
    return {"id": bookmark.id, "step": bookmark.step, "note": bookmark.note, "created": created}


def _describe_marker(marker: Marker) -> dict[str, Any]:
    return {
        "step": marker.step,
        "kind": marker.kind,
        "request_id": marker.request_id,
        "note": marker.note,
    }


def make_cursor(info: SessionInfo) -> str:
    """Return what a page of the list that ends with this session gives as `next`."""
    return f"{info.started_ns}.{info.id}"


def parse_cursor(text: str | None) -> tuple[int, str] | None:
    """Return the place in the list that a `next` stands for; raises `RequestError`."""
    if text is None:
        return None
    started, dot, session_id = text.partition(".")
    if dot and started.isascii() and started.isdigit() and len(started) <= _MAX_CURSOR_DIGITS:
        started_ns = int(started)
        if started_ns < 2**63:
            return started_ns, session_id
    raise RequestError("before must be the `next` of another page.", param="before")


# ---------------------------------------------------------------- bodies


def _answer_frames(request: AnyRequest, frames: ChunkFrames) -> Response[bytes]:
    etag = f'"{hashlib.sha256(frames.data).hexdigest()[:32]}"'
    headers = {"Cache-Control": FOR_EVER if frames.is_whole else "no-store", "ETag": etag}
    if _has_it(request.headers.get("if-none-match", ""), etag):
        return Response(b"", status_code=304, headers=headers)
    return Response(frames.data, media_type="application/octet-stream", headers=headers)


def _has_it(if_none_match: str, etag: str) -> bool:
    """Whether the client's list of tags, weak ones too, names this one; our tags have no commas."""
    tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return etag in tags or tags == ["*"]


def _encode_state(
    snapshot: EngineSnapshot, facts: dict[str, Any], config: dict[str, Any] | None, *, with_blocks: bool
) -> bytes:
    return msgspec.json.encode({**facts, **snapshot.to_dict(with_blocks=with_blocks), "config": config})


def _encode_records(records: list[StepRecord]) -> bytes:
    return msgspec.json.encode({"items": records})


def _json(value: object, status_code: int = 200) -> Response[bytes]:
    body = msgspec.json.encode(value)
    return Response(body, media_type=MediaType.JSON, status_code=status_code, headers=NO_STORE)


async def _read_body(request: AnyRequest, kind: type[T]) -> T:
    body = await request.body()
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise RequestError(f"The body is not right: {error}.", code="invalid_body") from None
    except msgspec.DecodeError as error:
        reason = _find_half_character(body) or f"is not JSON: {error}"
        raise RequestError(f"The body {reason}.", code="invalid_json") from None


def _find_half_character(body: bytes) -> str | None:
    """Return what is wrong with a body that is JSON but for an escape that is half of a character's two."""
    try:
        value = json.loads(body)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])[1:-1]
        return f"holds half a character: {half} is one of two escapes, the other of which is missing"
    except (ValueError, RecursionError):
        pass
    return None
