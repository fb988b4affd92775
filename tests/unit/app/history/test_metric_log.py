"""Sums per second, compared with the fold's totals over a random run."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import msgspec

from app.db.writer import HistoryWriter
from app.db.writes import Write
from app.history.metric_log import MetricLog
from engine.snapshot import EngineSnapshot
from tests.builders import random_run

NS_PER_S = 10**9


class Collector:
    """Stands in for the writer; keeps the rows."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add_holder(self, _flush: Callable[[], None]) -> None:
        """Nobody reads these rows before the end."""

    def put(self, *writes: Write) -> bool:
        for write in writes:
            self.rows += [dict(row) for row in write.rows]
        return True


def make_log(collector: Collector) -> MetricLog:
    writer: HistoryWriter = collector  # type: ignore[assignment]
    return MetricLog("s", writer, flush_s=3600)


async def test_every_step_is_counted_once_in_the_second_in_which_it_began() -> None:
    collector = Collector()
    log = make_log(collector)
    snapshot = None
    steps: dict[int, int] = defaultdict(int)
    most: dict[int, list[tuple[int, int]]] = defaultdict(list)
    decoded = 0
    for number, (core, result) in enumerate(random_run(3, 500, fail_rate=0.01)):
        snapshot = snapshot or EngineSnapshot(core.config)
        record = msgspec.structs.replace(result.record, t_ns=100 * NS_PER_S + number * 73_000_000)
        snapshot.apply(record)
        log.on_record(record, snapshot)
        steps[record.t_ns // NS_PER_S] += 1
        most[record.t_ns // NS_PER_S].append((record.num_running, record.num_waiting))
        decoded += sum(entry.is_decode for entry in record.batch)
    log.on_close()
    assert snapshot is not None
    rows, totals = collector.rows, snapshot.totals

    assert {row["second"]: row["num_steps"] for row in rows} == steps
    assert len(rows) == len(steps)
    for row in rows:
        running, waiting = zip(*most[row["second"]], strict=True)
        assert (row["max_running"], row["num_running"]) == (max(running), running[-1])
        assert (row["max_waiting"], row["num_waiting"]) == (max(waiting), waiting[-1])
    assert any(row["max_waiting"] > row["num_waiting"] for row in rows), "peaks within a second are kept"
    assert sum(row["num_decode_tokens"] for row in rows) == decoded
    for name, total in (
        ("num_prefill_tokens", totals.num_prefill_tokens),
        ("num_evictions", totals.num_evictions),
        ("num_preemptions", totals.num_preemptions),
        ("num_hit_tokens", totals.num_hit_tokens),
        ("num_lookup_tokens", totals.num_lookup_tokens),
        ("num_arrived", totals.num_arrived),
        ("num_finished", totals.num_finished),
    ):
        assert total > 0, name
        assert sum(row[name] for row in rows) == total, name
    assert rows[-1]["last_step"] == snapshot.step


async def test_a_clock_that_jumps_back_loses_nothing() -> None:
    collector = Collector()
    log = make_log(collector)
    snapshot = None
    for number, (core, result) in enumerate(random_run(3, 30)):
        snapshot = snapshot or EngineSnapshot(core.config)
        second = 100 if number < 10 or number >= 20 else 40
        record = msgspec.structs.replace(result.record, t_ns=second * NS_PER_S)
        snapshot.apply(record)
        log.on_record(record, snapshot)
    log.on_close()

    assert [(row["second"], row["num_steps"]) for row in collector.rows] == [(100, 10), (40, 10), (100, 10)]
