"""What a run came to, measured from its step records: recorded and simulated runs are measured alike."""

from collections import Counter
from collections.abc import Mapping

import msgspec

from engine.records import Admitted, Arrived, Event, Finished, Preempted, RecordKind, Rejected, StepRecord
from engine.sequence import FinishReason
from engine.simulate.costs import measured_ns, whole_ns

_NS_PER_MS, _NS_PER_S = 1e6, 1e9


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Times are None where nothing was there to be measured.

    TTFT is from arrival to the end of the step that gave the first token, an inter-token time from there to
    the next token's. `busy_s` is the time with work, and `output_tok_s` is per second of that.
    `num_recomputed_tokens` were computed before and are computed again after a preemption;
    `recompute_percent` is their share of all computed tokens. `hit_percent`: share of the tokens of first
    admissions that the prefix cache or the host tier had. `num_swaps`: preemptions that kept something.
    """

    num_requests: int
    num_finished: int
    num_aborted: int
    num_failed: int
    num_rejected: int
    num_steps: int
    busy_s: float
    num_output_tokens: int
    output_tok_s: float | None
    ttft_mean_ms: float | None
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    inter_token_mean_ms: float | None
    inter_token_p99_ms: float | None
    num_preemptions: int
    num_swaps: int
    num_computed_tokens: int
    num_recomputed_tokens: int
    recompute_percent: float | None
    hit_percent: float | None


class Measurement:
    """Takes the records of a run in order and adds up."""

    def __init__(self, arrivals_ns: Mapping[str, int] | None = None) -> None:
        """Count from `arrivals_ns` by request, where given, and else from when the engine took a request."""
        self._arrivals_ns = arrivals_ns or {}
        self._arrived_ns: dict[int, int] = {}  # of sequences without a token
        self._last_token_ns: dict[int, int] = {}
        self._computed: dict[int, int] = {}  # tokens that a preempted sequence once had
        self._previous: StepRecord | None = None
        self._counts: Counter[str] = Counter()
        self._busy_ns = 0
        self._ttft_ns: Counter[int] = Counter()
        self._inter_token_ns: Counter[int] = Counter()

    def add(self, record: StepRecord) -> None:
        """Take the next record."""
        if self._previous is not None:
            self._busy_ns += whole_ns(self._previous, record.t_ns)
        self._previous = record
        for event in record.events:
            self._begin(event)
        if record.kind == RecordKind.STEP:
            self._counts["steps"] += 1
            self._take_batch(record)
        for event in record.events:
            if isinstance(event, Finished):
                self._end(event)

    def _begin(self, event: Event) -> None:
        counts = self._counts
        match event:
            case Arrived():
                counts["requests"] += 1
                self._arrived_ns[event.seq_id] = self._arrivals_ns.get(event.request_id, event.t_ns)
            case Admitted() if not event.resumed:
                counts["lookup"] += event.num_tokens
                counts["hits"] += event.num_cached_tokens + event.num_host_tokens
            case Preempted():
                counts["preemptions"] += 1
                counts["swaps"] += event.num_tokens_kept > 0
                num_had = event.num_tokens_lost + event.num_tokens_kept
                self._computed[event.seq_id] = max(num_had, self._computed.get(event.seq_id, 0))
            case Rejected():
                counts["rejected"] += 1

    def _take_batch(self, record: StepRecord) -> None:
        ended_ns = record.t_ns + measured_ns(record)
        num_computed = num_tokens = 0
        last_token_ns, inter_token_ns = self._last_token_ns, self._inter_token_ns
        for entry in record.batch:
            num_computed += entry.num_scheduled
            seq_id = entry.seq_id
            if entry.token_id >= 0:
                num_tokens += 1
                before_ns = last_token_ns.get(seq_id)
                if before_ns is not None:
                    inter_token_ns[ended_ns - before_ns] += 1
                elif seq_id in self._arrived_ns:
                    self._ttft_ns[ended_ns - self._arrived_ns.pop(seq_id)] += 1
                last_token_ns[seq_id] = ended_ns
        if self._computed:
            self._take_recomputed(record)
        self._counts["computed"] += num_computed
        self._counts["tokens"] += num_tokens

    def _take_recomputed(self, record: StepRecord) -> None:
        for entry in record.batch:
            num_had, num_before = self._computed.get(entry.seq_id, 0), entry.num_computed_before
            if num_before < num_had:
                again = min(num_had, num_before + entry.num_scheduled) - num_before
                self._counts["recomputed"] += again

    def _end(self, event: Finished) -> None:
        kinds = {FinishReason.ABORT: "aborted", FinishReason.ERROR: "failed"}
        self._counts[kinds.get(FinishReason(event.reason), "finished")] += 1
        for known in (self._arrived_ns, self._last_token_ns, self._computed):
            known.pop(event.seq_id, None)

    def figures(self) -> Figures:
        """Return what it comes to so far."""
        counts = self._counts
        busy_ns = self._busy_ns + (measured_ns(self._previous) if self._previous is not None else 0)
        return Figures(
            num_requests=counts["requests"],
            num_finished=counts["finished"],
            num_aborted=counts["aborted"],
            num_failed=counts["failed"],
            num_rejected=counts["rejected"],
            num_steps=counts["steps"],
            busy_s=busy_ns / _NS_PER_S,
            num_output_tokens=counts["tokens"],
            output_tok_s=_divide(counts["tokens"] * _NS_PER_S, busy_ns),
            ttft_mean_ms=_mean_ms(self._ttft_ns),
            ttft_p50_ms=_percentile_ms(self._ttft_ns, 50),
            ttft_p99_ms=_percentile_ms(self._ttft_ns, 99),
            inter_token_mean_ms=_mean_ms(self._inter_token_ns),
            inter_token_p99_ms=_percentile_ms(self._inter_token_ns, 99),
            num_preemptions=counts["preemptions"],
            num_swaps=counts["swaps"],
            num_computed_tokens=counts["computed"],
            num_recomputed_tokens=counts["recomputed"],
            recompute_percent=_divide(100 * counts["recomputed"], counts["computed"]),
            hit_percent=_divide(100 * counts["hits"], counts["lookup"]),
        )


def _divide(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _mean_ms(times_ns: Counter[int]) -> float | None:
    total_ns = sum(time_ns * count for time_ns, count in times_ns.items())
    return _divide(total_ns / _NS_PER_MS, times_ns.total())


def _percentile_ms(times_ns: Counter[int], percent: float) -> float | None:
    """Return the smallest time that so many percent of all do not exceed."""
    rank = times_ns.total() * percent / 100
    for time_ns in sorted(times_ns):
        rank -= times_ns[time_ns]
        if rank <= 0:
            return time_ns / _NS_PER_MS
    return None
