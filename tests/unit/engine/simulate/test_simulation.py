import random
from dataclasses import replace
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import ConfigError
from engine.records import Finished, Loaded, Policies, Preempted, Rejected, StepRecord
from engine.runner.fake import FakeRunner
from engine.sampling_params import SamplingParams
from engine.sequence import EngineRequest
from engine.simulate.costs import StepCosts
from engine.simulate.figures import Measurement
from engine.simulate.pace import ReckonedPace
from engine.simulate.simulation import Simulation, simulate
from engine.simulate.workload import VOCAB_SIZE, Ending, SimulatedLoad, SimulatedRequest, make_tokens
from tests.builders import make_config

COSTS = StepCosts(step_ns=3e6, prefill_token_ns=3e5, decode_token_ns=1e6, context_token_ns=800)
MS = 1_000_000


def make_load(seed: int, num_requests: int = 40) -> SimulatedLoad:
    """Return requests that share beginnings and arrive faster than a tiny engine serves them."""
    rng = random.Random(seed)
    prefixes = [make_tokens(f"prefix {number}", 12) for number in range(3)]
    arrival_ns, requests = 0, []
    for number in range(num_requests):
        arrival_ns += rng.randrange(20 * MS)
        own = make_tokens(f"{seed} {number}", rng.randrange(1, 9))
        requests.append(
            SimulatedRequest(
                request_id=f"q{number}",
                arrival_ns=arrival_ns,
                prompt=rng.choice(prefixes) + own,
                max_tokens=rng.randrange(1, 12),
                priority=rng.choice([-1, 0, 1]),
            )
        )
    return SimulatedLoad(requests=requests)


def one(**fields: Any) -> SimulatedLoad:
    request = SimulatedRequest(
        **{"request_id": "q", "arrival_ns": 5 * MS, "prompt": make_tokens("q", 6), "max_tokens": 4, **fields}
    )
    return SimulatedLoad(requests=[request])


def run(config: EngineConfig, load: SimulatedLoad, **pace: float) -> list[StepRecord]:
    return list(Simulation(config, load, ReckonedPace(COSTS, **pace)).records())


def events(records: list[StepRecord], kind: type) -> list[Any]:
    return [event for record in records for event in record.events if isinstance(event, kind)]


def test_the_same_input_gives_the_same_records() -> None:
    config = make_config(num_blocks=12, num_host_blocks=8, policy="priority")

    assert run(config, make_load(3)) == run(config, make_load(3))


@pytest.mark.parametrize("preemption", ["newest-first", "smallest-residual"])
def test_decisions_are_those_of_the_engine_over_another_model(preemption: str) -> None:
    config = make_config(num_blocks=12, preemption=preemption)
    load = make_load(4)
    simulated = run(config, load)
    runner = FakeRunner(config.num_blocks, config.block_size, vocab_size=VOCAB_SIZE)
    core = EngineCore(config, runner)
    waiting = list(load.requests)
    real = []
    for record in simulated:
        while waiting and waiting[0].arrival_ns <= record.t_ns:
            request = waiting.pop(0)
            core.add_request(
                EngineRequest(
                    request_id=request.request_id,
                    prompt_token_ids=request.prompt,
                    priority=request.priority,
                    sampling_params=SamplingParams(max_tokens=request.max_tokens, temperature=0),
                )
            )
        real.append(core.step().record)

    assert [decisions(record) for record in real] == [decisions(record) for record in simulated]
    assert not core.has_work
    assert events(simulated, Preempted)


def decisions(record: StepRecord) -> tuple[Any, ...]:
    """Return what was decided in a step; hashes and tokens are other ones."""
    ops = [(op.kind, op.block_id, op.slot) for op in record.block_ops]
    batch = [
        (entry.seq_id, entry.slot, entry.num_computed_before, entry.num_scheduled) for entry in record.batch
    ]
    others = [event for event in record.events if isinstance(event, Preempted | Finished)]
    return ops, batch, others, record.stop_reason, record.prefix_pending


def test_the_clock_moves_by_the_costs_and_skips_what_is_idle() -> None:
    [request] = one().requests
    load = SimulatedLoad(requests=[request, replace(request, request_id="later", arrival_ns=10**12)])

    records = run(make_config(), load)

    assert records[0].t_ns == 5 * MS
    assert records[0].forward_ns == 3 * MS + 6 * 300_000
    assert records[1].t_ns == records[0].t_ns + records[0].forward_ns
    assert records[4].t_ns == 10**12
    assert all(record.schedule_ns == record.host_ns == 0 for record in records)


def test_the_next_token_depends_on_all_earlier_ones_and_not_on_preemptions() -> None:
    load = SimulatedLoad(
        requests=[
            SimulatedRequest(request_id=f"q{n}", arrival_ns=0, prompt=make_tokens(f"{n}", 6), max_tokens=20)
            for n in range(4)
        ]
    )

    def answers(num_blocks: int) -> list[list[int]]:
        records = run(make_config(num_blocks=num_blocks, max_model_len=32), load)
        found: dict[int, list[int]] = {}
        for record in records:
            for entry in record.batch:
                if entry.token_id >= 0:
                    found.setdefault(entry.seq_id, []).append(entry.token_id)
        assert bool(events(records, Preempted)) == (num_blocks == 10)
        return [found[seq_id] for seq_id in sorted(found)]

    assert answers(10) == answers(40)
    assert len({tuple(answer) for answer in answers(40)}) == 4


def test_a_scripted_answer_is_given_and_the_model_may_end_it() -> None:
    answer = make_tokens("answer", 3)

    records = run(make_config(), one(answer=answer, ending=Ending.MODEL, num_output_tokens=3, max_tokens=9))

    assert [entry.token_id for record in records for entry in record.batch] == [*answer[:2], VOCAB_SIZE]
    assert [event.reason for event in events(records, Finished)] == ["stop"]


def test_a_stop_string_is_heard_of_after_the_step() -> None:
    records = run(make_config(), one(ending=Ending.TEXT, num_output_tokens=2, max_tokens=9))

    [finished] = events(records, Finished)
    assert (finished.reason, finished.num_output_tokens) == ("stop", 2)
    assert finished in records[2].events


def test_a_client_leaves_at_its_moment() -> None:
    leave_ns = 5 * MS + 7 * MS

    records = run(make_config(), one(ending=Ending.CLIENT, leave_ns=leave_ns, max_tokens=9))

    [finished] = events(records, Finished)
    assert finished.reason == "abort"
    assert finished.num_output_tokens == 2
    assert sum(record.forward_ns for record in records[:2]) >= 7 * MS


def test_policies_change_at_their_moment() -> None:
    policies = Policies("priority", "oldest-first", "recompute")
    load = replace(one(), policies=[(9 * MS, policies)])

    records = run(make_config(), load)

    assert [policies in record.events for record in records].index(True) == 1


def test_one_policy_can_be_fixed_while_the_others_change() -> None:
    changes = [
        (1, Policies("priority", "oldest-first", "auto")),
        (2, Policies("fcfs", "smallest-residual", "recompute")),
    ]
    load = replace(one(), policies=changes)

    assert load.with_policies({}) == load
    assert load.with_policies({"preemption": "newest-first"}).policies == [
        (1, Policies("priority", "newest-first", "auto")),
        (2, Policies("fcfs", "newest-first", "recompute")),
    ]


def test_what_is_refused_is_counted() -> None:
    load = one(prompt=make_tokens("long", 40))

    figures = simulate(make_config(), load, ReckonedPace(COSTS))

    assert (figures.num_rejected, figures.num_requests, figures.ttft_mean_ms) == (1, 0, None)
    assert len(events(run(make_config(), load), Rejected)) == 1


def test_loads_take_their_time_beside_the_steps() -> None:
    requests = [
        SimulatedRequest(request_id=f"q{n}", arrival_ns=0, prompt=make_tokens(f"{n}", 6), max_tokens=20)
        for n in range(4)
    ]
    config = make_config(num_blocks=16, num_host_blocks=20, preemption_mode="swap", max_model_len=32)

    quick = run(config, SimulatedLoad(requests=requests), copy_ns_per_block=1000)
    slow = run(config, SimulatedLoad(requests=requests), copy_ns_per_block=15 * MS)

    assert [event.num_steps for event in events(quick, Loaded)] == [1, 2]
    assert [event.num_steps for event in events(slow, Loaded)] == [1, 8]


def test_settings_that_cannot_work_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="policy is 'none'"):
        Simulation(make_config(policy="none"), one(), ReckonedPace(COSTS))


def test_a_load_without_requests_ends_at_once() -> None:
    assert run(make_config(), SimulatedLoad(requests=[])) == []


def test_choices_of_a_request_arrive_together() -> None:
    [request] = one().requests
    load = SimulatedLoad(requests=[request, replace(request, choice_index=1, max_tokens=2)])

    figures = simulate(make_config(), load, ReckonedPace(COSTS))

    assert (figures.num_requests, figures.num_finished, figures.num_output_tokens) == (2, 2, 6)


def test_a_load_can_be_cut_and_sped_up() -> None:
    load = replace(make_load(1), policies=[(MS, Policies("fcfs", "newest-first", "auto"))])
    first = load.requests[0].arrival_ns
    leaving = replace(load, requests=[replace(load.requests[9], leave_ns=load.requests[9].arrival_ns + 7)])

    assert len(load.first(3).requests) == 3
    assert load.first(None) == load
    assert {request.arrival_ns for request in load.at_speed(0).requests} == {first}
    fast = load.at_speed(4)
    assert fast.requests[-1].arrival_ns - first == round((load.requests[-1].arrival_ns - first) / 4)
    [request] = leaving.at_speed(2).requests
    assert request.leave_ns == request.arrival_ns + 7


def test_figures_count_from_arrival_or_from_when_the_engine_took_it() -> None:
    [request] = one(max_tokens=3).requests
    late = replace(request, request_id="late", arrival_ns=request.arrival_ns + 1 * MS)
    load = SimulatedLoad(requests=[request, late])

    from_arrival = simulate(make_config(), load, ReckonedPace(COSTS))
    from_taking = simulate(make_config(), load, ReckonedPace(COSTS), counts_from_arrival=False)

    assert from_arrival.ttft_mean_ms is not None
    assert from_taking.ttft_mean_ms == pytest.approx(from_arrival.ttft_mean_ms - 3.8 / 2)


def test_recomputed_tokens_are_those_that_were_computed_before() -> None:
    load = SimulatedLoad(
        requests=[
            SimulatedRequest(request_id=f"q{n}", arrival_ns=0, prompt=make_tokens(f"{n}", 6), max_tokens=20)
            for n in range(4)
        ]
    )
    config = make_config(num_blocks=10, max_model_len=32, enable_prefix_caching=False)
    records = run(config, load)
    measurement = Measurement()
    for record in records:
        measurement.add(record)
    figures = measurement.figures()

    # Each token but an answer's last is computed once; whatever is more was computed again.
    assert figures.num_recomputed_tokens == figures.num_computed_tokens - 4 * (6 + 20 - 1) > 0
    assert figures.num_preemptions == len(events(records, Preempted))
    assert figures.recompute_percent == pytest.approx(
        100 * figures.num_recomputed_tokens / figures.num_computed_tokens
    )
    assert figures.busy_s == pytest.approx(sum(record.forward_ns for record in records) / 1e9)
