"""What the templates of decisions show: whom the scheduler preempted and why, whom it admitted with what."""

from typing import Any, Final

import msgspec

from app.realtime.decisions import SequenceName, StepDecisions, order_candidates
from app.web.live_context import REASON_WORDS, short_id
from app.web.miss_words import MissView, describe_miss
from app.web.templating import NO_VALUE, format_count
from engine.records import Admitted, Loaded, Policies, Preempted, Stalled
from engine.snapshot import PRIORITY_POLICY

SCORE_WORDS: Final = {
    "newest-first": "the later it arrived, the lower",
    "oldest-first": "the earlier it arrived, the lower",
    "smallest-residual": "tokens that it may still generate",
    "lowest-temperature": "its sampling temperature",
    "least-computed-first": "its computed tokens",
}
"""What the scores of a preemption policy are."""

SCORE_ORDER_WORDS: Final = "the lowest score goes first, of equal ones the latest arrival"
URGENCY_ORDER_WORDS: Final = (
    "the least urgent (highest priority number) go first, of these the lowest score, of equal ones the "
    "latest arrival"
)
"""In which order candidates would go, by the queue policy."""

SWAP_SIGN: Final = "\u21c5"
RECOMPUTE_SIGN: Final = "\u25bc"
_NS_PER_MS: Final = 1e6


class Party(msgspec.Struct, frozen=True):
    """A sequence that a decision is about. `request_id` is empty where it is not known any more."""

    seq_id: int
    request_id: str
    name: str
    priority: int | None


class CandidateLine(msgspec.Struct, frozen=True, kw_only=True):
    """One who could have been preempted."""

    party: Party
    score: str
    is_victim: bool


class PreemptionView(msgspec.Struct, frozen=True, kw_only=True):
    """One preemption with all candidates, in the order in which they would have gone.

    `need`: what it was for, "block", "slot" or "room"; empty where the record does not say it.
    """

    victim: Party
    beneficiary: Party
    is_own_need: bool
    need: str
    policy: str
    score_words: str
    mode: str
    num_tokens_lost: int
    num_tokens_kept: int
    num_blocks_freed: int
    recompute_cost: str
    swap_cost: str
    why_it: str
    why_mode: str
    order_words: str
    candidates: list[CandidateLine]


class AdmissionView(msgspec.Struct, frozen=True, kw_only=True):
    """One admission; `num_tokens` = cached + from the host tier + to be computed."""

    party: Party
    slot: int
    is_resumed: bool
    num_tokens: int
    num_cached_tokens: int
    num_host_tokens: int
    num_new_tokens: int
    miss: MissView


class DecisionsView(msgspec.Struct, frozen=True, kw_only=True):
    """All decisions of one step. `others`: what else happened, each with whom it was about, if anybody."""

    step: int
    t_ns: int
    title: str
    stop_words: str
    policies: Policies
    preemptions: list[PreemptionView]
    admissions: list[AdmissionView]
    others: list[tuple[Party | None, str]]


class DecisionLink(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the list of decisions under the timeline."""

    key: str
    step: int
    sign: str
    kind: str
    party: Party | None
    words: str


def make_decisions_view(found: StepDecisions) -> DecisionsView:
    """Describe the decisions of a step."""
    preemptions = [_describe_preemption(event, found) for event in found.preemptions]
    admissions = [_describe_admission(event, found) for event in found.events if isinstance(event, Admitted)]
    counts = ((len(preemptions), "preemption"), (len(admissions), "admission"))
    parts = [count_of(count, what) for count, what in counts if count]
    return DecisionsView(
        step=found.step,
        t_ns=found.t_ns,
        title=", ".join(parts) or "nobody was preempted or admitted",
        stop_words=REASON_WORDS[found.stop_reason],
        policies=found.policies,
        preemptions=preemptions,
        admissions=admissions,
        others=[
            (_other_party(event, found), _word_other(event))
            for event in found.events
            if isinstance(event, Loaded | Policies | Stalled)
        ],
    )


def list_links(found: StepDecisions) -> list[DecisionLink]:
    """Return what was decided in a step as short entries, preemptions first."""
    in_order = sorted(found.events, key=lambda event: not isinstance(event, Preempted))
    return [_make_link(number, event, found) for number, event in enumerate(in_order)]


def list_newest(newest: list[tuple[StepDecisions, Preempted]]) -> list[DecisionLink]:
    """Return the newest preemptions as short entries."""
    return [_make_link(event.seq_id, event, found) for found, event in newest]


def count_of(count: int, what: str) -> str:
    """Return a count with its noun."""
    return f"{format_count(count)} {what}" + ("" if count == 1 else "s")


def format_cost(ns: float) -> str:
    """Return a reckoned span; a dash where nothing was reckoned."""
    return f"{ns / _NS_PER_MS:.3g} ms" if ns > 0 else NO_VALUE


def format_score(score: float) -> str:
    """Return a score so that different ones look different."""
    return format_count(score) if score.is_integer() else repr(score)


# ---------------------------------------------------------------- preemptions


def _describe_preemption(event: Preempted, found: StepDecisions) -> PreemptionView:
    in_order = _order(event, found)
    by_urgency = found.policies.policy == PRIORITY_POLICY
    return PreemptionView(
        victim=_party(event.seq_id, found),
        beneficiary=_party(event.beneficiary, found),
        is_own_need=event.beneficiary == event.seq_id,
        need=event.need,
        policy=event.policy,
        score_words=SCORE_WORDS.get(event.policy, "as the policy reckons it"),
        mode=event.mode,
        num_tokens_lost=event.num_tokens_lost,
        num_tokens_kept=event.num_tokens_kept,
        num_blocks_freed=event.num_blocks_freed,
        recompute_cost=format_cost(event.recompute_ns),
        swap_cost=format_cost(event.swap_ns),
        why_it=_word_choice(event, in_order, found),
        why_mode=_word_mode(event, found),
        order_words=URGENCY_ORDER_WORDS if by_urgency else SCORE_ORDER_WORDS,
        candidates=[
            CandidateLine(
                party=_party(seq_id, found),
                score=format_score(float(score)),
                is_victim=seq_id == event.seq_id,
            )
            for seq_id, score in in_order
        ],
    )


def _order(event: Preempted, found: StepDecisions) -> list[tuple[int, float]]:
    priorities = {seq_id: name.priority for seq_id, name in found.names.items()}
    return order_candidates(event, found.policies.policy, priorities)


def _word_choice(event: Preempted, in_order: list[tuple[int, float]], found: StepDecisions) -> str:
    if not in_order or in_order[0][0] != event.seq_id:
        return "It was chosen; what is on record does not say why."
    if found.policies.policy == PRIORITY_POLICY:
        return _word_urgency(event, in_order, found)
    num, num_lowest = len(in_order), _count_lowest(in_order)
    shown = format_score(float(in_order[0][1]))
    if num == 1:
        return "It was the only one whose blocks could be taken."
    if num_lowest == 1:
        return f"Its score, {shown}, is the lowest of {num}."
    return f"{num_lowest} of {num} have the lowest score, {shown}; of these it arrived last."


def _word_urgency(event: Preempted, in_order: list[tuple[int, float]], found: StepDecisions) -> str:
    """Say why the first one was taken where the least urgent go first."""
    num = len(in_order)
    if num == 1:
        # Older records have only the least urgent ones of those that might have been taken.
        words = "whose blocks could be taken" if event.need else "on record that could have been taken"
        return f"It was the only one {words}."
    number = _party(event.seq_id, found).priority
    peers = [(seq_id, score) for seq_id, score in in_order if _party(seq_id, found).priority == number]
    if len(peers) == 1:
        return f"It is the least urgent of {num}, with priority {number}."
    lead = (
        f"The {len(peers)} least urgent of {num}" if len(peers) < num else {2: "Both"}.get(num, f"All {num}")
    )
    shown, num_lowest = format_score(float(peers[0][1])), _count_lowest(peers)
    lead += f" have priority {number}"
    if num_lowest == 1:
        return f"{lead}; its score, {shown}, is the lowest of these."
    return f"{lead}; {num_lowest} of these have the lowest score, {shown}, and it arrived last."


def _count_lowest(in_order: list[tuple[int, float]]) -> int:
    return sum(score == in_order[0][1] for _, score in in_order)


def _word_mode(event: Preempted, found: StepDecisions) -> str:
    asked, recompute, swap = found.policies.preemption_mode, event.recompute_ns, event.swap_ns
    if event.num_tokens_kept:
        if asked == "swap":
            return "swapping is what the mode in force asks for"
        return "copying was reckoned cheaper" if recompute > swap else "neither way has been measured"
    if not found.has_host_tier:
        return "there is no host tier to copy to"
    if asked == "recompute":
        return "recomputing is what the mode in force asks for"
    if asked == "auto" and recompute <= swap and swap > 0:
        return "computing again was reckoned cheaper"
    return "no block was full, or the host tier had no room"


# ---------------------------------------------------------------- admissions and the rest


def _describe_admission(event: Admitted, found: StepDecisions) -> AdmissionView:
    return AdmissionView(
        party=_party(event.seq_id, found),
        slot=event.slot,
        is_resumed=event.resumed,
        num_tokens=event.num_tokens,
        num_cached_tokens=event.num_cached_tokens,
        num_host_tokens=event.num_host_tokens,
        num_new_tokens=event.num_tokens - event.num_cached_tokens - event.num_host_tokens,
        miss=describe_miss(event.miss),
    )


def _other_party(event: Loaded | Policies | Stalled, found: StepDecisions) -> Party | None:
    return None if isinstance(event, Policies) else _party(event.seq_id, found)


def _word_other(event: Loaded | Policies | Stalled) -> str:
    match event:
        case Loaded():
            waited = "a step waited for it" if event.waited else "no step waited for it"
            ended = "; the sequence had ended meanwhile" if event.is_orphan else ""
            blocks, steps = count_of(event.num_blocks, "block"), count_of(event.num_steps, "step")
            return f"{blocks} came back from the host tier in {steps}; {waited}{ended}"
        case Stalled():
            return (
                f"was ended with an error, because nothing could go on: {event.num_running} running, "
                f"{event.num_waiting} waiting, {count_of(event.num_available, 'block')} available"
            )
        case Policies():
            return (
                f"Policies changed: order {event.policy}, victim {event.preemption}, "
                f"mode {event.preemption_mode}"
            )


def _make_link(number: int, event: Any, found: StepDecisions) -> DecisionLink:
    kind, sign, words = _word_link(event)
    party = None if isinstance(event, Policies) else _party(event.seq_id, found)
    key = f"decision-{found.step}-{number}"
    return DecisionLink(key=key, step=found.step, sign=sign, kind=kind, party=party, words=words)


def _word_link(event: Any) -> tuple[str, str, str]:
    """Return kind, sign and words of an entry."""
    match event:
        case Preempted():
            if event.num_tokens_kept:
                return "swap", SWAP_SIGN, "preempted, swapped out"
            return "recompute", RECOMPUTE_SIGN, "preempted, to be computed again"
        case Admitted():
            num_found = event.num_cached_tokens + event.num_host_tokens
            verb = "resumed" if event.resumed else "admitted"
            return (
                "admit",
                "+",
                f"{verb}, {format_count(num_found)} of {count_of(event.num_tokens, 'token')} found",
            )
        case Loaded():
            return "loaded", "\u2193", "loaded from the host tier"
        case Stalled():
            return "stalled", "!", "ended: nothing could go on"
        case _:
            return "policies", "\u2699", "policies changed"


def _party(seq_id: int, found: StepDecisions) -> Party:
    return make_party(seq_id, found.names.get(seq_id))


def make_party(seq_id: int, known: SequenceName | None) -> Party:
    """Return what to call a sequence."""
    if known is None:
        return Party(seq_id, "", f"sequence {seq_id}", None)
    name = short_id(known.request_id) + (f"\u00b7{known.choice_index}" if known.choice_index else "")
    return Party(seq_id, known.request_id, name, known.priority)
