"""What the templates of requests show. Plain data, no markup; times stay Unix ns for the filters."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final
from urllib.parse import urlencode

import msgspec

from app.services.request_life import BlockChange, Candidate, Phase, Wait
from app.services.request_rows import RequestEvent, RequestFacts
from app.services.requests import Choice, RequestLife
from app.web.live_context import REASON_WORDS, format_age, short_id
from app.web.miss_words import MissView, describe_miss
from app.web.request_query import FILTER_NAMES
from app.web.templating import NO_VALUE
from engine.records import PrefixMiss, StopReason

BAR_UNITS: Final = 1000
MIN_BAR_UNITS: Final = 2
"""What has begun is seen, however short it was."""

BLOCK_UNITS: Final = 100
WAITING_PHASES: Final = ("queued", "preempted")
MAX_BLOCK_ROWS: Final = 200
TOKEN_ROWS: Final = 100

PHASE_WORDS: Final = {
    "queued": "waited for a slot and blocks",
    "prefill": "prompt computed",
    "decode": "answer generated",
    "preempted": "blocks taken away, waiting again",
    "recompute": "prompt and answer so far computed again",
}
NEED_WORDS: Final = {
    "block": "ran, needed a block",
    "slot": "more urgent, waited for a slot",
    "room": "more urgent, waited for blocks",
}
"""What a preemption was for."""

KIND_WORDS: Final = {"api": "API", "chat": "chat", "load": "load run"}

_NS_PER_MS: Final = 1e6
_MS_PER_S: Final = 1000
_LONG_S: Final = 10


class RequestLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the list."""

    facts: RequestFacts
    short_id: str
    kind: str
    outcome: str
    ttft: str
    duration: str


class PhaseBar(msgspec.Struct, frozen=True, kw_only=True):
    """A phase as a part of the bar, in thousandths, and in words; `waits`: why, and how many steps."""

    kind: str
    words: str
    waits: list[tuple[str, int]]
    x: float
    width: float
    first_step: int
    last_step: int | None
    start_ns: int
    duration: str


class AdmissionLine(msgspec.Struct, frozen=True, kw_only=True):
    """One admission, the first or a later one: tokens in all, found where, and why no more were found."""

    step: int
    num_tokens: int
    num_cached_tokens: int
    num_host_tokens: int
    miss: MissView | None


class PreemptionLine(msgspec.Struct, frozen=True, kw_only=True):
    """One preemption; `candidates` have short ids and come in the order in which they would have gone.

    They are None where the step record was not read. `costs`: what the two modes were reckoned to take.
    `need`: what the one it was for needed, empty where that is not recorded.
    """

    event: RequestEvent
    candidates: list[tuple[str, Candidate]] | None
    num_tokens_kept: int
    costs: str
    need: str


class TokenLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the token table."""

    index: int
    step: int
    token_id: int | None
    text: str | None
    ms: str
    batch_size: int
    num_batch_tokens: int


class LifeView(msgspec.Struct, frozen=True, kw_only=True):
    """One choice as the page draws it. `area`: the SVG path of blocks held, empty without any."""

    choice: Choice
    phases: list[PhaseBar]
    admissions: list[AdmissionLine]
    preemptions: list[PreemptionLine]
    area: str
    max_blocks: int
    span: str
    ttft: str
    prefill_rate: str
    decode_rate: str
    block_rows: list[BlockChange]
    num_block_rows: int
    token_rows: list[TokenLine]
    tokens_from: int
    num_tokens: int


def make_line(facts: RequestFacts) -> RequestLine:
    """Describe a request for the list."""
    return RequestLine(
        facts=facts,
        short_id=short_id(facts.id),
        kind=KIND_WORDS.get(facts.kind, facts.kind),
        outcome=describe_outcome(facts),
        ttft=_between(facts.arrived_ns, facts.first_token_ns),
        duration=_duration(facts),
    )


def make_query(values: Mapping[str, str], **more: str) -> str:
    """Return the filters that are set, and more parameters, as the query of an address."""
    names = {name: values[name].strip() for name in FILTER_NAMES if values.get(name, "").strip()}
    return urlencode({**names, **more})


def describe_outcome(facts: RequestFacts) -> str:
    """Return why a request ended, a reason or an error code; empty if its status says as much."""
    told = facts.error_code or facts.finish_reason or ""
    return "" if told in {"abort", "error"} else told.replace("_", " ")


def make_life_view(life: RequestLife, choice: Choice, tokens_from: int, now_ns: int) -> LifeView:
    """Return what is drawn of one choice; an open phase ends now."""
    facts = life.request.facts
    start_ns, end_ns = facts.arrived_ns, _find_end(life, choice, now_ns)
    span_ns = max(1, end_ns - start_ns)
    blocks, tokens = choice.life.blocks, choice.life.tokens
    texts = choice.texts
    rows = [
        TokenLine(
            index=token.index,
            step=token.step,
            token_id=token.token_id if choice.has_token_ids else None,
            text=texts[number] if texts is not None else None,
            ms=format_ms(token.ms),
            batch_size=token.batch_size,
            num_batch_tokens=token.num_batch_tokens,
        )
        for number, token in enumerate(tokens)
        if tokens_from <= number < tokens_from + TOKEN_ROWS
    ]
    return LifeView(
        choice=choice,
        phases=[_make_bar(phase, start_ns, span_ns, end_ns, choice.life.waits) for phase in choice.phases],
        admissions=_list_admissions(life, choice),
        preemptions=_list_preemptions(life, choice),
        area=_draw_blocks(blocks, start_ns, span_ns),
        max_blocks=max((change.num_blocks for change in blocks), default=0),
        span=format_ms(span_ns / _NS_PER_MS),
        ttft=format_ms(tokens[0].ms if tokens and tokens[0].index == 0 else None),
        prefill_rate=_prefill_rate(choice),
        decode_rate=_decode_rate(choice, end_ns),
        block_rows=blocks[:MAX_BLOCK_ROWS],
        num_block_rows=len(blocks),
        token_rows=rows,
        tokens_from=tokens_from,
        num_tokens=len(tokens),
    )


def describe_params(facts: RequestFacts) -> list[tuple[str, str]]:
    """Return the sampling parameters that were set."""
    return [
        (name, value if isinstance(value, str) else msgspec.json.encode(value).decode())
        for name, value in facts.params.items()
    ]


def format_ms(ms: float | None) -> str:
    """Return a span in the unit that suits it; a dash for none."""
    if ms is None:
        return NO_VALUE
    if ms < _MS_PER_S:
        return f"{ms:.1f} ms" if ms < 100 else f"{ms:.0f} ms"
    seconds = ms / _MS_PER_S
    return f"{seconds:.2f} s" if seconds < _LONG_S else format_age(seconds)


def context_of_row(facts: RequestFacts) -> dict[str, Any]:
    """Return the numbers of a request's head in words."""
    return {
        "short_id": short_id(facts.id),
        "kind": KIND_WORDS.get(facts.kind, facts.kind),
        "outcome": describe_outcome(facts),
        "queued": _between(facts.arrived_ns, facts.admitted_ns),
        "ttft": _between(facts.arrived_ns, facts.first_token_ns),
        "duration": _duration(facts),
        "params": describe_params(facts),
    }


def _duration(facts: RequestFacts) -> str:
    return NO_VALUE if facts.status == "rejected" else _between(facts.arrived_ns, facts.ended_ns)


def _between(start_ns: int, end_ns: int | None) -> str:
    return format_ms((end_ns - start_ns) / _NS_PER_MS if end_ns is not None else None)


def _find_end(life: RequestLife, choice: Choice, now_ns: int) -> int:
    facts = life.request.facts
    if facts.ended_ns is None and facts.is_open:
        return now_ns
    known = [phase.end_ns or phase.start_ns for phase in choice.phases]
    known += [facts.ended_ns or facts.arrived_ns]
    known += [token.t_ns for token in choice.life.tokens[-1:]]
    return max(known)


def _list_admissions(life: RequestLife, choice: Choice) -> list[AdmissionLine]:
    lines = []
    for event in life.request.events:
        if event.kind not in {"admitted", "resumed"} or event.choice_index != choice.index:
            continue
        detail = event.detail
        lines.append(
            AdmissionLine(
                step=event.step,
                num_tokens=detail["num_tokens"],
                num_cached_tokens=detail["num_cached_tokens"],
                num_host_tokens=detail.get("num_host_tokens", 0),
                miss=_read_miss(detail),
            )
        )
    return lines


def _read_miss(detail: Mapping[str, Any]) -> MissView | None:
    """Return why no more was found; sessions of before there was a host tier do not say it."""
    if "miss" not in detail:
        return None
    return describe_miss(msgspec.convert(detail["miss"], PrefixMiss | None))


def _describe_costs(detail: Mapping[str, Any]) -> str:
    costs = (detail.get("recompute_ns", 0), detail.get("swap_ns", 0))
    if not any(costs):
        return ""
    recompute, swap = (format_ms(cost / _NS_PER_MS) for cost in costs)
    return f"reckoned: recompute {recompute}, swap {swap}"


def _list_preemptions(life: RequestLife, choice: Choice) -> list[PreemptionLine]:
    found = choice.life.candidates
    return [
        PreemptionLine(
            event=event,
            candidates=_name_candidates(found.get(event.step)),
            num_tokens_kept=event.detail.get("num_tokens_kept", 0),
            costs=_describe_costs(event.detail),
            need=NEED_WORDS.get(event.detail.get("need", ""), ""),
        )
        for event in life.request.events
        if event.kind == "preempted" and event.choice_index == choice.index
    ]


def _name_candidates(found: list[Candidate] | None) -> list[tuple[str, Candidate]] | None:
    if found is None:
        return None
    return [(short_id(candidate.request_id), candidate) for candidate in found]


def _sum_waits(phase: Phase, waits: Sequence[Wait]) -> list[tuple[str, int]]:
    """Return why a phase without a slot went on and in how many steps, most first."""
    sums: dict[str, int] = {}
    if phase.kind in WAITING_PHASES:
        for wait in waits:
            last = wait.last_step if phase.last_step is None else min(wait.last_step, phase.last_step)
            num_steps = last - max(wait.first_step, phase.first_step) + 1
            if num_steps > 0:
                words = REASON_WORDS[StopReason[wait.reason.upper()]]
                sums[words] = sums.get(words, 0) + num_steps
    return sorted(sums.items(), key=lambda item: -item[1])


def _make_bar(phase: Phase, start_ns: int, span_ns: int, end_ns: int, waits: Sequence[Wait]) -> PhaseBar:
    phase_end = phase.end_ns if phase.end_ns is not None else end_ns
    width = max(MIN_BAR_UNITS, BAR_UNITS * (phase_end - phase.start_ns) / span_ns)
    x = min(BAR_UNITS * (phase.start_ns - start_ns) / span_ns, BAR_UNITS - MIN_BAR_UNITS)
    return PhaseBar(
        kind=phase.kind,
        words=PHASE_WORDS[phase.kind],
        waits=_sum_waits(phase, waits),
        x=round(max(0.0, x), 2),
        width=round(width, 2),
        first_step=phase.first_step,
        last_step=phase.last_step,
        start_ns=phase.start_ns,
        duration=format_ms((phase_end - phase.start_ns) / _NS_PER_MS),
    )


def _draw_blocks(blocks: Sequence[BlockChange], start_ns: int, span_ns: int) -> str:
    """Return a path of steps: blocks held over time, closed along the bottom."""
    most = max((change.num_blocks for change in blocks), default=0)
    if not most:
        return ""
    parts = [f"M0 {BLOCK_UNITS}"]
    for change in blocks:
        x = min(BAR_UNITS, max(0.0, BAR_UNITS * (change.t_ns - start_ns) / span_ns))
        parts.append(f"H{x:.2f}V{BLOCK_UNITS * (1 - change.num_blocks / most):.2f}")
    parts.append(f"H{BAR_UNITS}V{BLOCK_UNITS}Z")
    return "".join(parts)


def _prefill_rate(choice: Choice) -> str:
    """Return how fast the prompt's tokens were computed, where that was done in one go."""
    for phase, following in pairwise(choice.phases):
        if phase.kind == "prefill" and following.kind == "decode":
            return _rate(choice.num_prefill_tokens, following.start_ns - phase.start_ns)
    return NO_VALUE


def _decode_rate(choice: Choice, end_ns: int) -> str:
    """Return how fast tokens came while the sequence was decoding; times of waiting again do not count."""
    num_tokens, span_ns = 0, 0
    for phase in choice.phases:
        if phase.kind == "decode":
            phase_end = phase.end_ns if phase.end_ns is not None else end_ns
            span_ns += phase_end - phase.start_ns
            num_tokens += sum(phase.start_ns < token.t_ns <= phase_end for token in choice.life.tokens)
    return _rate(num_tokens, span_ns)


def _rate(count: int, span_ns: int) -> str:
    return f"{count / (span_ns / 1e9):,.1f} tok/s" if count and span_ns > 0 else NO_VALUE
