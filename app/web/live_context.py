"""What the templates of the engine view show, live or recorded, from a snapshot. Plain data, no markup."""

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from app.engine_host import EngineHost
from app.web.templating import NO_VALUE, format_count, format_percent
from engine.config import EngineConfig
from engine.records import StopReason
from engine.snapshot import EngineSnapshot
from engine.views import BlockState, SequenceView, Totals

MAX_ROWS: Final = 100
"""Rows of running and of waiting requests on the page; the rest is counted."""

BAR_UNITS: Final = 1000
SHORT_ID_CHARS: Final = 8
_NS_PER_S: Final = 1e9
_NS_PER_MS: Final = 1_000_000
_MS_PER_S: Final = 1000
_S_PER_MIN: Final = 60
_S_PER_H: Final = 3600

STATE_WORDS: Final = {
    BlockState.FREE: "blank: never used, or its content was dropped",
    BlockState.CACHED: "unused, but can be found again until its memory is needed",
    BlockState.ACTIVE: "held by one sequence, full",
    BlockState.TAIL: "held by one sequence, still being filled",
    BlockState.SHARED: "held by two or more sequences",
    BlockState.RESERVED: "set aside by the engine",
    BlockState.OFFLOADED: "not on the device",
}
SHOWN_STATES: Final = (
    BlockState.FREE,
    BlockState.CACHED,
    BlockState.ACTIVE,
    BlockState.TAIL,
    BlockState.SHARED,
)

REASON_WORDS: Final = {
    StopReason.QUEUE_EMPTY: "nobody is waiting",
    StopReason.TOKEN_BUDGET: "the step's token budget is used up",
    StopReason.MAX_NUM_SEQS: "every slot is taken",
    StopReason.NO_FREE_BLOCKS: "too few blocks are free",
    StopReason.WATERMARK: "the last free blocks are kept for running requests",
    StopReason.PRIORITY: "a more important request goes first",
    StopReason.PREFIX_PENDING: "a running request is computing the same prefix",
    StopReason.PAUSED: "the scheduler is paused",
}


class Named(msgspec.Struct, frozen=True):
    """A number of the wire with its name and what it means."""

    number: int
    name: str
    words: str


class Segment(msgspec.Struct, frozen=True):
    """A part of a request's bar, in thousandths of prompt + allowed answer."""

    kind: str
    x: float
    width: float


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the request list."""

    seq_id: int
    request_id: str
    short_id: str
    slot: int
    state: str
    detail: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    max_tokens: int
    num_blocks: int
    num_preemptions: int
    bar: list[Segment]
    bar_text: str


class Panels(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the refreshed panels show."""

    is_open: bool
    is_recorded: bool
    """Whether this is a step of a recorded session rather than now."""
    num_watching: int
    """Pages that are connected now."""
    step: int
    num_running: int
    num_waiting: int
    max_num_seqs: int
    running: list[RequestRow]
    waiting: list[RequestRow]
    used_text: str
    num_blocks: int
    num_free: int
    num_cached: int
    num_used: int
    hit_text: str
    hit_detail: str
    totals: list[tuple[str, str]]
    last_activity: str
    time_text: str
    """Time of the newest step's start, to the millisecond; empty before the first."""
    day_text: str


def describe_states() -> list[Named]:
    """Return the block states of the legend, in the order of their numbers."""
    return [Named(state, state.name.lower(), STATE_WORDS[state]) for state in SHOWN_STATES]


def describe_reasons() -> list[Named]:
    """Return every reason for which the scheduler stops admitting."""
    return [Named(reason, reason.name.lower(), REASON_WORDS[reason]) for reason in StopReason]


def make_panels(
    snapshot: EngineSnapshot | None, *, num_watching: int = 0, now_ns: int | None = None
) -> Panels:
    """Describe the live engine as of its newest record; an empty picture while the model loads (None)."""
    is_open = snapshot is not None
    snapshot = snapshot or EngineSnapshot(EngineConfig(num_blocks=1))
    panels = _describe(snapshot, now_ns or time.time_ns())
    if is_open:
        return msgspec.structs.replace(panels, num_watching=num_watching)
    return msgspec.structs.replace(panels, is_open=False, used_text=NO_VALUE, num_blocks=0, num_free=0)


def make_recorded_panels(snapshot: EngineSnapshot) -> Panels:
    """Describe the engine as it was after a recorded step; it was then that requests had been waiting."""
    return msgspec.structs.replace(_describe(snapshot, snapshot.t_ns), is_recorded=True)


def _describe(snapshot: EngineSnapshot, now_ns: int) -> Panels:
    config, totals = snapshot.config, snapshot.totals
    running, waiting = snapshot.running, snapshot.waiting
    return Panels(
        is_open=True,
        is_recorded=False,
        num_watching=0,
        step=snapshot.step,
        num_running=len(running),
        num_waiting=len(waiting),
        max_num_seqs=config.max_num_seqs,
        running=[_running_row(view) for view in running[:MAX_ROWS]],
        waiting=[_waiting_row(view, now_ns) for view in waiting[:MAX_ROWS]],
        used_text=format_percent(snapshot.num_used, config.num_blocks),
        num_blocks=config.num_blocks,
        num_free=snapshot.num_free,
        num_cached=snapshot.num_cached,
        num_used=snapshot.num_used,
        hit_text=format_percent(totals.num_hit_tokens, totals.num_lookup_tokens),
        hit_detail=_describe_hits(totals),
        totals=[(name, format_count(value)) for name, value, is_shown in _count_events(totals) if is_shown],
        last_activity=_clock_time(snapshot.t_ns) if snapshot.t_ns else "",
        time_text=_exact_time(snapshot.t_ns) if snapshot.t_ns else "",
        day_text=_utc(snapshot.t_ns, "%Y-%m-%d UTC") if snapshot.t_ns else "",
    )


def make_tables(snapshot: EngineSnapshot | None) -> dict[str, Any]:
    """Return the pictures as tables: blocks by state and by request, the newest batch and why it ended."""
    if snapshot is None:
        return {"by_state": [], "by_request": [], "num_blocks": 0, "batch": None, "stop_words": ""}
    counts = _count_states(snapshot)
    return {
        "by_state": [
            (state.name.lower(), STATE_WORDS[state], counts[state], format_percent(counts[state], total))
            for state in SHOWN_STATES
            if (total := snapshot.config.num_blocks)
        ],
        "by_request": [_blocks_of(view, snapshot) for view in snapshot.running],
        "num_blocks": snapshot.config.num_blocks,
        "batch": _describe_batch(snapshot),
        "stop_words": _stop_words(snapshot),
    }


def _stop_words(snapshot: EngineSnapshot) -> str:
    record = snapshot.last_record
    return REASON_WORDS[StopReason(record.stop_reason)] if record is not None else ""


def _describe_batch(snapshot: EngineSnapshot) -> dict[str, Any] | None:
    """Return the newest step that computed something, None before the first."""
    record = snapshot.last_batch
    if record is None:
        return None
    entries = []
    for entry in record.batch:
        view = snapshot.sequences.get(entry.seq_id)  # None: it ended in this step
        name = _short_name(view) if view else f"sequence {entry.seq_id}, ended"
        entries.append((name, entry.slot, "decode" if entry.is_decode else "prefill", entry.num_scheduled))
    return {"step": record.step, "entries": entries, "num_tokens": sum(entry[-1] for entry in entries)}


def describe_engine(host: EngineHost) -> dict[str, Any]:
    """Return what the card over the grid says: loading with progress, failed with the reason, or nothing."""
    progress = host.progress
    return {
        "engine_status": str(host.status),
        "engine_error": host.error,
        "load_stage": progress.stage if progress else "",
        "load_percent": round(100 * progress.fraction) if progress else 0,
    }


def short_id(request_id: str) -> str:
    """Return the part of a request id by which people tell requests apart."""
    return request_id.rpartition("-")[2][:SHORT_ID_CHARS] or request_id[:SHORT_ID_CHARS]


def _describe_hits(totals: Totals) -> str:
    return f"{format_count(totals.num_hit_tokens)} of {format_count(totals.num_lookup_tokens)} tokens"


def _count_events(totals: Totals) -> Iterator[tuple[str, int, bool]]:
    """Yield name, count and whether it is shown: what goes wrong, only once it has."""
    yield "finished", totals.num_finished, True
    yield "preemptions", totals.num_preemptions, True
    yield "evictions", totals.num_evictions, True
    yield "aborted", totals.num_aborted, totals.num_aborted > 0
    yield "failed", totals.num_failed, totals.num_failed > 0
    yield "refused", totals.num_rejected, totals.num_rejected > 0


def _running_row(view: SequenceView) -> RequestRow:
    if view.num_computed_tokens >= view.num_tokens - 1 and view.num_output_tokens > 0:
        unit = "token" if view.num_output_tokens == 1 else "tokens"
        state, detail = "decode", f"{format_count(view.num_output_tokens)} {unit}"
    else:
        state = "recompute" if view.num_preemptions else "prefill"
        detail = format_percent(view.num_computed_tokens, view.num_tokens)
    return _row(view, state, detail)


def _waiting_row(view: SequenceView, now_ns: int) -> RequestRow:
    reason = REASON_WORDS[StopReason[view.reason.upper()]] if view.reason else "arrived after the last step"
    since = format_age((now_ns - view.arrived_ns) / _NS_PER_S)
    return _row(view, "preempted" if view.num_preemptions else "waiting", f"{since}: {reason}")


def _row(view: SequenceView, state: str, detail: str) -> RequestRow:
    return RequestRow(
        seq_id=view.seq_id,
        request_id=view.request_id,
        short_id=_short_name(view),
        slot=view.slot,
        state=state,
        detail=detail,
        num_prompt_tokens=view.num_prompt_tokens,
        num_cached_tokens=view.num_cached_tokens,
        num_computed_tokens=view.num_computed_tokens,
        num_output_tokens=view.num_output_tokens,
        max_tokens=view.max_tokens,
        num_blocks=len(view.block_table),
        num_preemptions=view.num_preemptions,
        bar=list(_bar(view)),
        bar_text=(
            f"{view.num_prompt_tokens} prompt tokens, {view.num_cached_tokens} of them from the cache; "
            f"{view.num_output_tokens} of at most {view.max_tokens} generated; "
            f"{view.num_computed_tokens} computed"
        ),
    )


def _short_name(view: SequenceView) -> str:
    return short_id(view.request_id) + (f"·{view.choice_index}" if view.choice_index else "")


def _bar(view: SequenceView) -> Iterator[Segment]:
    """Yield the parts [0, cached) [cached, computed) [computed, prompt) [prompt, end), without empty ones."""
    unit = BAR_UNITS / (view.num_prompt_tokens + view.max_tokens)
    computed = min(view.num_computed_tokens, view.num_prompt_tokens)
    cached = min(view.num_cached_tokens, computed)
    edges = (
        ("cached", 0, cached),
        ("computed", cached, computed),
        ("todo", computed, view.num_prompt_tokens),
        ("generated", view.num_prompt_tokens, view.num_tokens),
    )
    for kind, start, end in edges:
        if end > start:
            yield Segment(kind, round(start * unit, 1), round((end - start) * unit, 1))


def _count_states(snapshot: EngineSnapshot) -> Counter[BlockState]:
    held = {block_id for view in snapshot.running for block_id in view.block_table}
    counts = Counter(snapshot.block(block_id).state for block_id in held)
    counts[BlockState.FREE] = snapshot.num_free
    counts[BlockState.CACHED] = snapshot.num_cached
    return counts


def _blocks_of(view: SequenceView, snapshot: EngineSnapshot) -> dict[str, Any]:
    counts = Counter(snapshot.block(block_id).state for block_id in view.block_table)
    return {
        "row": _running_row(view),
        "num_blocks": len(view.block_table),
        "num_shared": counts[BlockState.SHARED],
        "num_full": counts[BlockState.ACTIVE],
        "num_tail": counts[BlockState.TAIL],
    }


def format_age(seconds: float) -> str:
    """Return a span of time in the unit that suits it."""
    seconds = max(0.0, seconds)
    if seconds < 10:  # tenths are of interest
        return f"{seconds:.1f} s"
    if seconds < _S_PER_MIN:
        return f"{seconds:.0f} s"
    if seconds < _S_PER_H:
        return f"{seconds // _S_PER_MIN:.0f} min {seconds % _S_PER_MIN:02.0f} s"
    return f"{seconds // _S_PER_H:.0f} h {seconds % _S_PER_H // _S_PER_MIN:02.0f} min"


def _clock_time(t_ns: int) -> str:
    return _utc(t_ns, "%H:%M:%S UTC")


def _exact_time(t_ns: int) -> str:
    return f"{_utc(t_ns, '%H:%M:%S')}.{t_ns // _NS_PER_MS % _MS_PER_S:03d}"


def _utc(t_ns: int, pattern: str) -> str:
    return time.strftime(pattern, time.gmtime(t_ns // int(_NS_PER_S)))
