"""Requests and metrics as JSON: times in RFC 3339 with Z, spans in milliseconds."""

from typing import Any

import msgspec

from app.services.metric_rows import Metrics, MetricSpan
from app.services.request_life import BlockChange, Phase, TokenRow
from app.services.request_rows import RequestEvent, RequestFacts
from app.services.requests import Choice, RequestLife
from app.web.moments import to_rfc3339

_NS_PER_MS = 1e6
_NS_PER_S = 1_000_000_000
_COPIED = (
    "arrived_step",
    "admitted_step",
    "first_token_step",
    "ended_step",
    "num_choices",
    "max_tokens",
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_output_tokens",
    "num_preemptions",
    "num_recomputed_tokens",
    "finish_reason",
    "error_code",
    "params",
    "priority",
)


def describe_request(facts: RequestFacts) -> dict[str, Any]:
    """Return one entry of a list of requests."""
    return {
        "id": facts.id,
        "session": facts.session_id,
        "conversation": facts.conversation_id,
        "kind": facts.kind,
        "status": facts.status,
        "arrived": to_rfc3339(facts.arrived_ns),
        "admitted": _moment(facts.admitted_ns),
        "first_token": _moment(facts.first_token_ns),
        "ended": _moment(facts.ended_ns),
        "queued_ms": _span_ms(facts.arrived_ns, facts.admitted_ns),
        "ttft_ms": _span_ms(facts.arrived_ns, facts.first_token_ns),
        "duration_ms": _span_ms(facts.arrived_ns, facts.ended_ns),
        **{name: getattr(facts, name) for name in _COPIED},
    }


def describe_life(life: RequestLife) -> dict[str, Any]:
    """Return one request with everything that is known of it."""
    request = life.request
    events = [_describe_event(event) for event in request.events]
    texts = msgspec.to_builtins(request.texts) if request.texts is not None else None
    return {
        **describe_request(request.facts),
        "model": request.model_name,
        "text": texts,
        "events": events,
        "preemptions": [_add_candidates(event, life) for event in events if event["kind"] == "preempted"],
        "steps": {
            "first": life.steps.first,
            "last": life.steps.last,
            "next": life.steps.next,
            "missing": [{"first": first, "last": last} for first, last in life.steps.missing],
            "reason": life.steps.reason or None,
        },
        "choices": [_describe_choice(choice) for choice in life.choices],
    }


def describe_metrics(session_id: str, metrics: Metrics, complete_until_s: float) -> dict[str, Any]:
    """Return the spans of a chart; those that may still grow at `complete_until_s` say so."""
    return {
        "session": session_id,
        "width_s": metrics.width_s,
        "items": [
            _describe_span(
                span, metrics.width_s, is_complete=span.second + metrics.width_s <= complete_until_s
            )
            for span in metrics.spans
        ],
    }


def _describe_event(event: RequestEvent) -> dict[str, Any]:
    return {
        "kind": event.kind,
        "choice": event.choice_index,
        "step": event.step,
        "time": to_rfc3339(event.t_ns),
        **event.detail,
    }


def _add_candidates(preemption: dict[str, Any], life: RequestLife) -> dict[str, Any]:
    """Return a preemption with those that it was chosen from, null where its step was not read."""
    found = None
    for choice in life.choices:
        if choice.index == preemption["choice"]:
            found = choice.life.candidates.get(preemption["step"])
    return {**preemption, "candidates": msgspec.to_builtins(found)}


def _describe_choice(choice: Choice) -> dict[str, Any]:
    return {
        "index": choice.index,
        "seq_id": choice.seq_id,
        "finish_reason": choice.finish_reason,
        "phases": [_describe_phase(phase) for phase in choice.phases],
        "waits": msgspec.to_builtins(choice.life.waits),
        "victims": [
            {"step": step, "candidates": msgspec.to_builtins(candidates)}
            for step, candidates in choice.life.candidates.items()
        ],
        "prompt_chunks": msgspec.to_builtins(choice.life.chunks),
        "blocks": [_describe_change(change) for change in choice.life.blocks],
        "tokens": [
            _describe_token(token, choice, choice.texts[number] if choice.texts is not None else None)
            for number, token in enumerate(choice.life.tokens)
        ],
    }


def _describe_phase(phase: Phase) -> dict[str, Any]:
    return {
        "kind": phase.kind,
        "first_step": phase.first_step,
        "last_step": phase.last_step,
        "start": to_rfc3339(phase.start_ns),
        "end": _moment(phase.end_ns),
        "ms": _span_ms(phase.start_ns, phase.end_ns),
    }


def _describe_change(change: BlockChange) -> dict[str, Any]:
    return {
        "step": change.step,
        "time": to_rfc3339(change.t_ns),
        "num_blocks": change.num_blocks,
        "hit": change.hit,
        "allocated": change.allocated,
        "removed": change.removed,
    }


def _describe_token(token: TokenRow, choice: Choice, text: str | None) -> dict[str, Any]:
    return {
        "index": token.index,
        "step": token.step,
        "time": to_rfc3339(token.t_ns),
        "token_id": token.token_id if choice.has_token_ids else None,
        "text": text,
        "ms": round(token.ms, 3) if token.ms is not None else None,
        "batch_size": token.batch_size,
        "num_batch_tokens": token.num_batch_tokens,
    }


def _describe_span(span: MetricSpan, width_s: int, *, is_complete: bool) -> dict[str, Any]:
    values: dict[str, Any] = msgspec.to_builtins(span)
    second = values.pop("second")
    return {
        "time": to_rfc3339(second * _NS_PER_S),
        "unix": second,
        "is_complete": is_complete,
        **values,
        "prefill_tokens_per_s": span.num_prefill_tokens / width_s,
        "decode_tokens_per_s": span.num_decode_tokens / width_s,
        "ttft_avg_ms": span.ttft_ns / span.num_ttft / _NS_PER_MS if span.num_ttft else None,
    }


def _moment(t_ns: int | None) -> str | None:
    return to_rfc3339(t_ns) if t_ns is not None else None


def _span_ms(start_ns: int, end_ns: int | None) -> float | None:
    return round((end_ns - start_ns) / _NS_PER_MS, 3) if end_ns is not None else None
