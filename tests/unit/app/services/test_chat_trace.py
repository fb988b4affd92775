"""The figures under an answer, against the records that they come from."""

import pytest

from app.services.chat_trace import ChatTraces, Phase, RequestTrace
from engine.records import Admitted, Arrived, Preempted, StepRecord
from tests.builders import make_core, make_request, random_run


def _end_ns(record: StepRecord) -> int:
    return record.t_ns + record.schedule_ns + record.forward_ns + record.sample_ns + record.host_ns


@pytest.mark.parametrize("seed", [3, 4])
def test_figures_are_those_of_the_records(seed: int) -> None:
    """Follow every request of a random run with preemptions, and count by hand."""
    traces, followed = ChatTraces(), dict[int, RequestTrace]()
    records: list[StepRecord] = []
    snapshot = None
    for core, result in random_run(seed, 400):
        record = result.record
        for event in record.events:
            if isinstance(event, Arrived) and event.choice_index == 0:
                followed[event.seq_id] = traces.follow(event.request_id)
        traces.on_record(record, snapshot)  # type: ignore[arg-type] # it is not looked at
        records.append(record)
        config = core.config
    assert config.num_blocks
    assert any(trace.num_preemptions for trace in followed.values())
    for seq_id, trace in followed.items():
        events = [(record, event) for record in records for event in record.events]
        own = [(record, event) for record, event in events if getattr(event, "seq_id", None) == seq_id]
        admitted = [(r, e) for r, e in own if isinstance(e, Admitted) and not e.resumed]
        tokens = [
            record
            for record in records
            for entry in record.batch
            if entry.seq_id == seq_id and entry.token_id >= 0
        ]
        arrived = next(event for _, event in own if isinstance(event, Arrived))
        stats = trace.make_stats()
        assert stats.num_preemptions == sum(isinstance(event, Preempted) for _, event in own)
        assert stats.num_prompt_tokens == arrived.num_prompt_tokens
        assert stats.num_output_tokens == len(tokens)
        assert stats.num_cached_tokens == (admitted[0][1].num_cached_tokens if admitted else 0)
        assert stats.first_step == (admitted[0][0].step if admitted else 0)
        assert stats.first_token_step == (tokens[0].step if tokens else 0)
        assert stats.last_step == (tokens[-1].step if tokens else 0)
        if tokens:
            assert stats.ttft_ms == pytest.approx((_end_ns(tokens[0]) - arrived.t_ns) / 1e6)


def test_phases_follow_each_other() -> None:
    core = make_core(max_num_batched_tokens=4, num_blocks=16)
    traces = ChatTraces()
    trace = traces.follow("r0")
    assert trace.make_progress(0).phase is Phase.STARTING
    core.add_request(make_request("r0", prompt=10, max_tokens=3))
    seen = []
    while core.has_work:
        traces.on_record(core.step().record, None)  # type: ignore[arg-type]
        progress = trace.make_progress(traces.step)
        seen.append((progress.phase.value, progress.num_computed_tokens, progress.num_output_tokens))
    assert seen == [
        ("prefill", 4, 0),
        ("prefill", 8, 0),
        ("decode", 10, 1),
        ("decode", 11, 2),
        ("queued", 12, 3),
    ]


def test_who_waits_knows_for_what() -> None:
    core = make_core(max_num_seqs=1, num_blocks=16)
    traces = ChatTraces()
    traces.follow("r0")
    waiting = traces.follow("r1")
    core.add_request(make_request("r0", prompt=4, max_tokens=3))
    core.add_request(make_request("r1", prompt=4, max_tokens=3))
    traces.on_record(core.step().record, None)  # type: ignore[arg-type]
    progress = waiting.make_progress(traces.step)
    assert (progress.phase, progress.slot, progress.waits_for) == (Phase.QUEUED, -1, "max_num_seqs")


def test_requests_that_nobody_follows_cost_nothing() -> None:
    core = make_core()
    traces = ChatTraces()
    core.add_request(make_request("other"))
    traces.on_record(core.step().record, None)  # type: ignore[arg-type]
    traces.follow("r0")
    traces.forget("r0")
    traces.forget("r0")
    assert (traces._by_request, traces._by_seq) == ({}, {})
