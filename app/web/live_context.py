"""What the templates of the engine view show, live or recorded, from a snapshot. Plain data, no markup."""

import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from app.engine_host import EngineHost
from app.web.templating import NO_VALUE, format_count, format_percent
from engine.config import EngineConfig
from engine.records import Policies, StopReason
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
    BlockState.RESERVED: "held by one sequence, empty: ahead of need, or its content is on its way",
    BlockState.OFFLOADED: "not on the device",
}
SHOWN_STATES: Final = (
    BlockState.FREE,
    BlockState.CACHED,
    BlockState.ACTIVE,
    BlockState.TAIL,
    BlockState.SHARED,
    BlockState.RESERVED,
)

REASON_WORDS: Final = {
    StopReason.QUEUE_EMPTY: "nobody is waiting",
    StopReason.TOKEN_BUDGET: "the step's token budget is used up",
    StopReason.MAX_NUM_SEQS: "every slot is taken",
    StopReason.NO_FREE_BLOCKS: "too few blocks are free",
    StopReason.WATERMARK: "the last free blocks are kept for running requests",
    StopReason.PRIORITY: "a more urgent request goes first",
    StopReason.PREFIX_PENDING: "a running request is computing the same prefix",
    StopReason.PAUSED: "the scheduler is paused",
    StopReason.PROMPT_ENDS: "the step is kept short for a first token",
}
_NEW_WORDS: Final = "came after the newest step"
_OWN_REASONS: Final = {StopReason.PRIORITY, StopReason.PREFIX_PENDING, StopReason.QUEUE_EMPTY}
"""Of a waiting request: what holds for itself, whatever the first in the queue waits for."""


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
    priority: int
    place: int
    """Of a waiting one: its place in the queue, from 1; of a running one 0."""
    bar: list[Segment]
    bar_text: str


class HostMeter(msgspec.Struct, frozen=True):
    """How full the host tier is; `pinned` of the `used` blocks cannot make room."""

    total: int
    used: int
    pinned: int
    used_text: str


class Total(msgspec.Struct, frozen=True):
    """A count since the start, as it is shown."""

    name: str
    value: str
    words: str = ""


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
    totals: list[Total]
    policies: Policies
    """In force after this step."""
    has_priorities: bool
    """Whether any request has another priority than 0."""
    host: HostMeter | None
    """None without a host tier."""
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
        running=[running_row(view) for view in running[:MAX_ROWS]],
        waiting=_waiting_rows(waiting[:MAX_ROWS], now_ns),
        used_text=format_percent(snapshot.num_used, config.num_blocks),
        num_blocks=config.num_blocks,
        num_free=snapshot.num_free,
        num_cached=snapshot.num_cached,
        num_used=snapshot.num_used,
        hit_text=format_percent(totals.num_hit_tokens, totals.num_lookup_tokens),
        hit_detail=_describe_hits(totals),
        totals=list(_list_totals(totals)),
        policies=snapshot.policies,
        has_priorities=any(view.priority for view in snapshot.sequences.values()),
        host=_measure_host(snapshot),
        last_activity=_clock_time(snapshot.t_ns) if snapshot.t_ns else "",
        time_text=_exact_time(snapshot.t_ns) if snapshot.t_ns else "",
        day_text=_utc(snapshot.t_ns, "%Y-%m-%d UTC") if snapshot.t_ns else "",
    )


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


def _measure_host(snapshot: EngineSnapshot) -> HostMeter | None:
    counts = snapshot.host_counts
    if counts["total"] == 0:
        return None
    used_text = format_percent(counts["used"], counts["total"])
    return HostMeter(counts["total"], counts["used"], counts["pinned"], used_text)


def _list_totals(totals: Totals) -> Iterator[Total]:
    """Yield what is shown of the counts: what does not happen in every engine, only once it has."""
    yield Total("finished", format_count(totals.num_finished))
    yield Total("preemptions", format_count(totals.num_preemptions))
    yield Total("evictions", format_count(totals.num_evictions))
    others = (
        (totals.num_swaps, "swaps", "preemptions that kept blocks in the host tier"),
        (totals.num_host_tokens, "tokens from host", "found in the host tier and not computed again"),
        (totals.num_aborted, "aborted", ""),
        (totals.num_failed, "failed", ""),
        (totals.num_rejected, "refused", ""),
        (totals.num_stalls, "stalls", "requests ended because nothing could go on: a fault of the engine"),
    )
    for value, name, words in others:
        if value > 0:
            yield Total(name, format_count(value), words)
    if totals.num_loads > 0:
        hidden = f"{format_count(totals.num_loads_hidden)} of {format_count(totals.num_loads)}"
        yield Total("copies hidden", hidden, f"prefetch hid {hidden} copies: no step waited for them")
    if totals.num_lookahead > 0:
        unused = f"{format_count(totals.num_lookahead_unused)} of them were given back unused"
        yield Total("blocks ahead", format_count(totals.num_lookahead), f"reserved before need; {unused}")


def running_row(view: SequenceView) -> RequestRow:
    """Describe a sequence that has a slot."""
    if view.is_loading:
        state, detail = "loading", "from the host tier"
    elif view.num_computed_tokens >= view.num_tokens - 1 and view.num_output_tokens > 0:
        state, detail = "decode", f"{format_count(view.num_output_tokens)} tok"
    else:
        state = "recompute" if view.num_preemptions else "prefill"
        detail = format_percent(view.num_computed_tokens, view.num_tokens)
    return _row(view, state, detail)


def _waiting_rows(views: Sequence[SequenceView], now_ns: int) -> list[RequestRow]:
    """Describe the queue in its order: why each waits, and how many are considered before it."""
    rows = []
    num_before = 0
    for place, view in enumerate(views, 1):
        since = format_age((now_ns - view.arrived_ns) / _NS_PER_S)
        state = "preempted" if view.num_preemptions else "waiting"
        rows.append(_row(view, state, f"{since}: {_word_wait(view, num_before)}", place))
        num_before += view.reason != StopReason.PREFIX_PENDING.name.lower()
    return rows


def _word_wait(view: SequenceView, num_before: int) -> str:
    reason = StopReason[view.reason.upper()] if view.reason else StopReason.QUEUE_EMPTY
    words = _NEW_WORDS if reason is StopReason.QUEUE_EMPTY else REASON_WORDS[reason]
    if reason in _OWN_REASONS or num_before == 0:
        return words
    return f"behind {num_before} {'other' if num_before == 1 else 'others'}; {words}"


def _row(view: SequenceView, state: str, detail: str, place: int = 0) -> RequestRow:
    return RequestRow(
        seq_id=view.seq_id,
        request_id=view.request_id,
        short_id=short_name(view),
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
        priority=view.priority,
        place=place,
        bar=list(_bar(view)),
        bar_text=(
            f"{view.num_prompt_tokens} prompt tokens, {view.num_cached_tokens} of them from the cache; "
            f"{view.num_output_tokens} of at most {view.max_tokens} generated; "
            f"{view.num_computed_tokens} computed"
        ),
    )


def short_name(view: SequenceView) -> str:
    """Return what people call a sequence."""
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
