"""Keeps sums for every second with steps: what the charts over a session are drawn from."""

import asyncio
from typing import Any, Final

import msgspec
from sqlalchemy import func
from sqlalchemy.dialects.sqlite import insert

from app.db.models import METRIC_MAXIMA, METRIC_NEWEST, METRIC_SUMS, MetricRow
from app.db.writer import HistoryWriter
from app.db.writes import Turn, Write
from engine.config import EngineConfig
from engine.records import Admitted, Arrived, Event, Finished, Preempted, StepRecord
from engine.sequence import FinishReason
from engine.snapshot import EngineSnapshot
from engine.views import Totals

_NS_PER_S: Final = 1_000_000_000
FLUSH_S: Final = 1.0
"""At the latest so long after a step its second is written, and again if the second goes on."""

_ROW_BYTES: Final = 300


def _make_upsert() -> Any:
    """Return an insert that adds to the row of the same second."""
    statement = insert(MetricRow)
    table, new = MetricRow.__table__.c, statement.excluded
    return statement.on_conflict_do_update(
        index_elements=["session_id", "second"],
        set_={
            **{name: table[name] + new[name] for name in METRIC_SUMS},
            **{name: func.max(table[name], new[name]) for name in METRIC_MAXIMA},
            **{name: new[name] for name in METRIC_NEWEST},
        },
    )


_UPSERT: Final = _make_upsert()


class MetricSums(msgspec.Struct):
    """What came since the last write; fields as in `MetricRow`."""

    second: int
    last_step: int = 0
    num_steps: int = 0
    step_ns: int = 0
    max_step_ns: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_hit_tokens: int = 0
    num_lookup_tokens: int = 0
    num_arrived: int = 0
    num_finished: int = 0
    num_preemptions: int = 0
    num_evictions: int = 0
    num_running: int = 0
    num_waiting: int = 0
    max_running: int = 0
    max_waiting: int = 0
    num_free: int = 0
    num_cached: int = 0
    num_used: int = 0
    ttft_ns: int = 0
    num_ttft: int = 0
    max_ttft_ns: int = 0


class MetricLog:
    """A `RecordPart`. A step belongs to the second in which it began."""

    def __init__(self, session_id: str, writer: HistoryWriter, *, flush_s: float = FLUSH_S) -> None:
        """Write to `writer`, at the latest `flush_s` after a step."""
        self._session_id = session_id
        self._writer = writer
        self._flush_s = flush_s
        self._sums: MetricSums | None = None
        self._arrived_ns: dict[int, int] = {}
        """Of the sequences that have no token yet."""
        self._num_prefill_tokens = 0
        self._num_evictions = 0
        """Both as of the record before, since the first one."""

        self._timer: asyncio.TimerHandle | None = None
        writer.add_holder(self._flush)

    def on_open(self, config: EngineConfig) -> None:
        """Nothing is needed of the engine's settings."""

    def on_record(self, record: StepRecord, snapshot: EngineSnapshot) -> None:
        """Add one step to its second."""
        second = record.t_ns // _NS_PER_S
        if self._sums is not None and self._sums.second != second:
            self._flush()
        if self._sums is None:
            self._sums = MetricSums(second)
            self._timer = asyncio.get_running_loop().call_later(self._flush_s, self._flush)
        sums = self._sums
        step_ns = record.schedule_ns + record.forward_ns + record.sample_ns + record.host_ns
        sums.num_steps += 1
        sums.step_ns += step_ns
        sums.max_step_ns = max(sums.max_step_ns, step_ns)
        sums.last_step = record.step
        sums.num_running, sums.num_waiting = record.num_running, record.num_waiting
        sums.max_running = max(sums.max_running, record.num_running)
        sums.max_waiting = max(sums.max_waiting, record.num_waiting)
        sums.num_free, sums.num_cached, sums.num_used = record.num_free, record.num_cached, record.num_used
        self._take_totals(record, snapshot.totals, sums)
        for event in record.events:
            self._begin(event, sums)
        if self._arrived_ns:
            self._take_first_tokens(record, record.t_ns + step_ns, sums)
        for event in record.events:
            self._end(event, sums)

    def on_close(self) -> None:
        """Put the last second."""
        self._flush()

    def _begin(self, event: Event, sums: MetricSums) -> None:
        match event:
            case Arrived():
                sums.num_arrived += 1
                self._arrived_ns[event.seq_id] = event.t_ns
            case Admitted() if not event.resumed:
                sums.num_lookup_tokens += event.num_tokens
                sums.num_hit_tokens += event.num_cached_tokens + event.num_host_tokens
            case Preempted():
                sums.num_preemptions += 1

    def _take_totals(self, record: StepRecord, totals: Totals, sums: MetricSums) -> None:
        """Add what the fold has counted already: a look at every entry would cost most of all this."""
        num_prefill = totals.num_prefill_tokens - self._num_prefill_tokens
        self._num_prefill_tokens = totals.num_prefill_tokens
        sums.num_prefill_tokens += num_prefill
        sums.num_evictions += totals.num_evictions - self._num_evictions
        self._num_evictions = totals.num_evictions
        if num_prefill:
            sums.num_decode_tokens += sum(entry.is_decode for entry in record.batch)
        else:
            sums.num_decode_tokens += len(record.batch)

    def _take_first_tokens(self, record: StepRecord, end_ns: int, sums: MetricSums) -> None:
        for entry in record.batch:
            arrived_ns = self._arrived_ns.pop(entry.seq_id, None) if entry.token_id >= 0 else None
            if arrived_ns is not None:
                ttft_ns = max(0, end_ns - arrived_ns)
                sums.ttft_ns += ttft_ns
                sums.num_ttft += 1
                sums.max_ttft_ns = max(sums.max_ttft_ns, ttft_ns)

    def _end(self, event: Event, sums: MetricSums) -> None:
        if isinstance(event, Finished):
            self._arrived_ns.pop(event.seq_id, None)
            sums.num_finished += event.reason in (FinishReason.STOP, FinishReason.LENGTH)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._sums is not None:
            row = {"session_id": self._session_id, **msgspec.structs.asdict(self._sums)}
            self._writer.put(Write(_UPSERT, [row], num_bytes=_ROW_BYTES, turn=Turn.METRICS))
            self._sums = None
