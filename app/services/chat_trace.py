"""Follows the answers of the playground through the step records: phase, tokens, times, preemptions."""

from enum import StrEnum

import msgspec

from app.services.chat_types import AnswerStats
from engine.config import EngineConfig
from engine.records import Admitted, Arrived, BatchEntry, Finished, Preempted, StepRecord, StopReason
from engine.snapshot import EngineSnapshot

_NS_PER_MS = 1e6
_NS_PER_S = 1e9


class Phase(StrEnum):
    """What the engine does for a request."""

    STARTING = "starting"
    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request is. `slot` is -1 unless it runs; `waits_for` a `StopReason`'s name, while it waits.

    `num_computed_tokens` of `num_known_tokens` (prompt and answer so far) have been computed.
    """

    phase: Phase
    seq_id: int
    slot: int
    step: int
    num_output_tokens: int
    num_computed_tokens: int
    num_known_tokens: int
    tok_s: float | None
    waits_for: str | None
    num_preemptions: int


class RequestTrace:
    """One request with one choice."""

    def __init__(self) -> None:
        """The engine does not know it yet."""
        self.seq_id = -1
        self.slot = -1
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_computed_tokens = 0
        self.num_output_tokens = 0
        self.num_preemptions = 0
        self.first_step = 0
        self.first_token_step = 0
        self.last_step = 0
        self._arrived_ns = 0
        self._admitted_ns = 0
        self._first_token_ns = 0
        self._last_token_ns = 0
        self._waits_for: str | None = None

    @property
    def phase(self) -> Phase:
        """What the engine does for it now."""
        if self.seq_id < 0:
            return Phase.STARTING
        if self.slot < 0:
            return Phase.QUEUED
        is_caught_up = self.num_computed_tokens >= self.num_prompt_tokens + self.num_output_tokens - 1
        return Phase.DECODE if self.num_output_tokens and is_caught_up else Phase.PREFILL

    def take_event(self, event: Arrived | Admitted | Preempted | Finished, record: StepRecord) -> None:
        """Take what happened to it in a step."""
        match event:
            case Arrived():
                self.seq_id = event.seq_id
                self.num_prompt_tokens = event.num_prompt_tokens
                self._arrived_ns = event.t_ns
            case Admitted():
                self.slot = event.slot
                self.num_computed_tokens = event.num_cached_tokens
                if not event.resumed:
                    self.num_cached_tokens = event.num_cached_tokens + event.num_host_tokens
                    self.first_step, self._admitted_ns = record.step, record.t_ns
            case Preempted():
                self.slot = -1
                self.num_preemptions += 1
                self.num_computed_tokens = 0
            case Finished():
                self.slot = -1

    def take_entry(self, entry: BatchEntry, record: StepRecord) -> None:
        """Take its share of a step."""
        self.num_computed_tokens = entry.num_computed_before + entry.num_scheduled
        if entry.token_id < 0:
            return
        self.num_output_tokens += 1
        self.last_step = record.step
        self._last_token_ns = _end_ns(record)
        if not self.first_token_step:
            self.first_token_step, self._first_token_ns = record.step, self._last_token_ns

    def take_wait(self, record: StepRecord) -> None:
        """Note why it was not admitted in a step."""
        reason = StopReason.PREFIX_PENDING if self.seq_id in record.prefix_pending else record.stop_reason
        self._waits_for = StopReason(reason).name.lower()

    def make_progress(self, step: int) -> Progress:
        """Describe it as of `step`."""
        phase = self.phase
        return Progress(
            phase=phase,
            seq_id=self.seq_id,
            slot=self.slot,
            step=step,
            num_output_tokens=self.num_output_tokens,
            num_computed_tokens=self.num_computed_tokens,
            num_known_tokens=self.num_prompt_tokens + self.num_output_tokens,
            tok_s=self._decode_tok_s(),
            waits_for=self._waits_for if phase is Phase.QUEUED else None,
            num_preemptions=self.num_preemptions,
        )

    def make_stats(self) -> AnswerStats:
        """Return what is known of it for good."""
        has_token = self.first_token_step > 0
        prefill_ns = self._first_token_ns - self._admitted_ns
        num_computed = self.num_prompt_tokens - self.num_cached_tokens
        return AnswerStats(
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=self.num_output_tokens,
            num_preemptions=self.num_preemptions,
            first_step=self.first_step,
            first_token_step=self.first_token_step,
            last_step=self.last_step,
            ttft_ms=(self._first_token_ns - self._arrived_ns) / _NS_PER_MS if has_token else None,
            prefill_tok_s=num_computed * _NS_PER_S / prefill_ns if has_token and prefill_ns > 0 else None,
            decode_tok_s=self._decode_tok_s(),
        )

    def _decode_tok_s(self) -> float | None:
        """Tokens after the first one, over the time that they took; preemptions count as time."""
        span_ns = self._last_token_ns - self._first_token_ns
        return (self.num_output_tokens - 1) * _NS_PER_S / span_ns if span_ns > 0 else None


class ChatTraces:
    """A part of the recorder: looks only for requests that were asked for with `follow`."""

    def __init__(self) -> None:
        """Start with none."""
        self._by_request: dict[str, RequestTrace] = {}
        self._by_seq: dict[int, RequestTrace] = {}
        self.step = 0
        """The newest step."""

    def follow(self, request_id: str) -> RequestTrace:
        """Follow a request, before the engine gets it, until `forget`."""
        trace = self._by_request[request_id] = RequestTrace()
        return trace

    def forget(self, request_id: str) -> None:
        """Follow it no longer; safe to repeat."""
        trace = self._by_request.pop(request_id, None)
        if trace is not None:
            self._by_seq.pop(trace.seq_id, None)

    def on_open(self, config: EngineConfig) -> None:
        """Need nothing."""

    def on_record(self, record: StepRecord, snapshot: EngineSnapshot) -> None:  # noqa: ARG002 - a part's
        """Take one record; costs next to nothing while nobody chats."""
        self.step = record.step
        if not self._by_request:
            return
        for event in record.events:
            trace = self._find(event)
            if trace is not None:
                assert isinstance(event, Arrived | Admitted | Preempted | Finished)  # noqa: S101 - as `_find`
                trace.take_event(event, record)
        for entry in record.batch:
            trace = self._by_seq.get(entry.seq_id)
            if trace is not None:
                trace.take_entry(entry, record)
        for trace in self._by_seq.values():
            if trace.slot < 0:
                trace.take_wait(record)

    def on_close(self) -> None:
        """Need nothing."""

    def _find(self, event: object) -> RequestTrace | None:
        if isinstance(event, Arrived):
            trace = self._by_request.get(event.request_id)
            if trace is not None:
                self._by_seq[event.seq_id] = trace
            return trace
        if isinstance(event, Admitted | Preempted | Finished):
            return self._by_seq.get(event.seq_id)
        return None


def _end_ns(record: StepRecord) -> int:
    """Return when a step ended, Unix nanoseconds."""
    return record.t_ns + record.schedule_ns + record.forward_ns + record.sample_ns + record.host_ns
