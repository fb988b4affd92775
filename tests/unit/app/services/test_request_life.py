"""A request's life from events and records, compared with the engine's own books step by step."""

from itertools import pairwise
from typing import Any

import pytest

from app.services.request_life import ChoiceLife, LifeReader, make_phases
from app.services.request_rows import RequestEvent
from engine.records import Admitted, Arrived, Preempted
from engine.snapshot import EngineSnapshot
from tests.builders import make_core, make_request, random_run, run_to_end


def make_events(*kinds: str) -> list[RequestEvent]:
    return [
        RequestEvent(choice_index=0, seq_id=3, step=number + 1, t_ns=100 * number, kind=kind, detail={})
        for number, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize(
    ("events", "phases"),
    [
        (["arrived"], ["queued"]),
        (["arrived", "finished"], ["queued"]),
        (["arrived", "admitted", "first_token", "finished"], ["queued", "prefill", "decode"]),
        (
            ["arrived", "admitted", "preempted", "resumed", "first_token"],
            ["queued", "prefill", "preempted", "recompute", "decode"],
        ),
        (
            ["arrived", "admitted", "first_token", "preempted", "resumed", "recomputed", "finished"],
            ["queued", "prefill", "decode", "preempted", "recompute", "decode"],
        ),
    ],
)
def test_phases_follow_each_other_without_gaps(events: list[str], phases: list[str]) -> None:
    made = make_phases(make_events(*events))

    assert [phase.kind for phase in made] == phases
    for before, after in pairwise(made):
        assert (before.end_ns, before.last_step) == (after.start_ns, after.first_step)
    assert (made[-1].end_ns is None) == (events[-1] != "finished")
    assert made[0].start_ns == 0


def test_blocks_and_tokens_are_those_of_the_engine_in_a_run_with_preemptions() -> None:
    run: list[Any] = []
    tables: list[dict[int, list[int]]] = []
    for core, result in random_run(5, 400):
        run.append(result.record)
        tables.append({seq.seq_id: list(seq.block_table) for seq in core.scheduler.state.running})
        config = core.config
    events = [event for record in run for event in record.events]
    preempted = {event.seq_id for event in events if isinstance(event, Preempted)}
    arrived = {event.seq_id: event for event in events if isinstance(event, Arrived)}
    hits = {event.seq_id for event in events if isinstance(event, Admitted) and event.num_cached_tokens}
    assert preempted
    assert hits

    for seq_id in sorted(preempted | set(list(hits)[:5])):
        life = ChoiceLife(choice_index=0, seq_id=seq_id)
        reader = LifeReader(EngineSnapshot(config), [life], arrived[seq_id].t_ns)
        assert reader.take(run) == len(run)
        held: set[int] = set()
        changes = {change.step: change for change in life.blocks}
        for record, table in zip(run, tables, strict=True):
            if change := changes.get(record.step):
                held = (held - set(change.removed)) | set(change.hit) | set(change.allocated)
                assert change.num_blocks == len(held)
            assert held == set(table.get(seq_id, []))
        emitted = [entry.token_id for record in run for entry in record.batch if entry.seq_id == seq_id]
        assert [token.token_id for token in life.tokens] == [token for token in emitted if token >= 0]
        assert [token.index for token in life.tokens] == list(range(len(life.tokens)))
        assert any(change.hit for change in life.blocks) or seq_id not in hits


def test_a_last_chunk_of_one_token_belongs_to_the_prompt() -> None:
    core = make_core(num_blocks=16, max_num_batched_tokens=16, max_model_len=64)
    core.add_request(make_request(prompt=33, max_tokens=3))
    run = [result.record for result in run_to_end(core)]
    life = ChoiceLife(choice_index=0, seq_id=1)
    LifeReader(EngineSnapshot(core.config), [life], run[0].t_ns).take(run)
    chunks = [(chunk.first_token, chunk.num_tokens) for chunk in life.chunks]
    assert chunks == [(0, 16), (16, 16), (32, 1)]
    assert len(life.tokens) == 3


def test_records_that_do_not_follow_are_left_and_can_be_taken_after_a_new_start() -> None:
    records = []
    snapshot = None
    for core, result in random_run(2, 60):
        records.append(result.record)
        snapshot = snapshot or EngineSnapshot(core.config)
    assert snapshot is not None
    life = ChoiceLife(choice_index=0, seq_id=0)
    later = EngineSnapshot(snapshot.config)
    for record in records[:30]:
        later.apply(record)

    reader = LifeReader(snapshot, [life], 0)
    assert reader.take(records[:10] + records[30:]) == 10
    reader.resume(later)
    assert reader.take(records[30:]) == 30
    assert reader.step == 60
