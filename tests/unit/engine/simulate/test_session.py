from collections import Counter
from typing import Any

import msgspec
import pytest

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.records import Arrived, Finished, Policies, RecordKind, Rejected, StepRecord
from engine.simulate.pace import RecordedPace
from engine.simulate.session import SessionLoad, read_session
from engine.simulate.simulation import Simulation
from engine.simulate.workload import Ending
from tests.builders import make_core, make_request, random_run
from tests.support.recording import make_run

RUNS: list[dict[str, Any]] = [
    {},
    {"num_blocks": 18, "preemption": "smallest-residual"},
    {"policy": "priority", "preemption": "oldest-first"},
    {"num_host_blocks": 30, "load_steps": 3, "preemption_mode": "swap"},
    {"num_host_blocks": 30, "policy_rate": 0.02, "policy": "priority", "preemption": "least-computed-first"},
    {"num_host_blocks": 20, "num_blocks": 18, "enable_prefix_caching": False},
]


def record_run(seed: int, **options: Any) -> tuple[EngineCore, list[StepRecord], dict[str, float]]:
    """Return a random run, to the end of its last request, and the temperature of each."""
    records: list[StepRecord] = []
    temperatures: dict[str, float] = {}
    cores: list[EngineCore] = []
    for core, result in random_run(seed, 200, **options):
        cores = [core]
        records.append(result.record)
        for name, sequences in core.scheduler.state.by_request.items():
            temperatures[name] = sequences[0].sampling_params.temperature
    [core] = cores
    while core.has_work:
        records.append(core.step().record)
    return core, records, temperatures


def decisions(records: list[StepRecord]) -> list[tuple[Any, ...]]:
    """Return what was decided in each step; what was noted between steps belongs to the step after."""
    found, ops = [], list[Any]()
    for record in records:
        ops += [(int(op.kind), op.block_id, op.slot) for op in record.block_ops]
        if record.kind == RecordKind.STEP:
            batch = [msgspec.structs.astuple(entry)[:4] for entry in record.batch]
            found.append((batch, ops, record.stop_reason, record.num_running, record.num_waiting))
            ops = []
    return found


def simulate_again(
    config: EngineConfig, records: list[StepRecord], temperatures: dict[str, float] | None = None
) -> list[StepRecord]:
    load = read_session(records, config, temperatures, exact=True)
    return list(Simulation(config, load, RecordedPace(records)).records())


@pytest.mark.parametrize("options", RUNS, ids=str)
def test_a_recorded_run_is_decided_again_step_for_step(options: dict[str, Any]) -> None:
    num_certain = 0
    for seed in range(8):
        core, records, temperatures = record_run(seed, abort_rate=0.0, **options)
        session = SessionLoad(core.config)
        for record in records:
            session.add(record)
        if session.num_guesses:
            continue
        num_certain += 1
        again = simulate_again(core.config, records, temperatures)
        assert decisions(again) == decisions(records), f"{seed=}"
    assert num_certain >= 2


def test_requests_that_were_ended_from_outside_end_in_the_same_step() -> None:
    core = make_core()
    records = []
    for number in range(4):
        core.add_request(make_request(f"q{number}", prompt=9, max_tokens=12))
    for action in [None, ("abort", "q1"), None, ("stop", "q2"), None, None]:
        match action:
            case ("abort", name):
                core.abort(name)
            case ("stop", name):
                core.stop(name, 0)
        records.append(core.step().record)
    while core.has_work:
        records.append(core.step().record)

    load = read_session(records, core.config)

    assert [request.ending for request in load.requests] == [
        Ending.LENGTH,
        Ending.CLIENT,
        Ending.TEXT,
        Ending.LENGTH,
    ]
    assert load.requests[2].leave_ns is None
    assert load.requests[2].num_output_tokens == 2
    assert decisions(simulate_again(core.config, records)) == decisions(records)


def test_an_end_token_ends_the_simulated_answer_too() -> None:
    core = make_core(eos_token_ids=frozenset(range(0, 1000, 3)))
    for number in range(6):
        core.add_request(make_request(f"q{number}", prompt=5 + number, max_tokens=12))
    records = []
    while core.has_work:
        records.append(core.step().record)

    load = read_session(records, core.config)

    assert Ending.MODEL in {request.ending for request in load.requests}
    assert decisions(simulate_again(core.config, records)) == decisions(records)


def test_prompts_share_exactly_what_was_shared() -> None:
    core = make_core(num_blocks=32)
    beginning = list(range(8))
    for name, prompt in {"a": [*beginning, 50, 51, 52], "b": [*beginning, 60, 61, 62], "c": [9] * 11}.items():
        core.add_request(make_request(name, prompt=prompt))
    records = []
    while core.has_work:
        records.append(core.step().record)

    a, b, c = (request.prompt for request in read_session(records, core.config).requests)

    assert a[:8] == b[:8]
    assert a[8:] != b[8:]
    assert a[:4] != c[:4]
    assert [len(a), len(b), len(c)] == [11, 11, 11]


def test_requests_with_missing_steps_are_left_out_and_counted() -> None:
    core, records, _ = record_run(1, abort_rate=0.0)
    whole, broken = SessionLoad(core.config), SessionLoad(core.config)
    for record in records:
        whole.add(record)
        if not 40 <= record.step < 60:
            broken.add(record)

    assert broken.num_left_out > 0
    assert 0 < len(broken.load().requests) < len(whole.load().requests)
    assert len(whole.load().requests) + whole.num_rejected == len(
        [event for record in records for event in record.events if isinstance(event, Arrived | Rejected)]
    )


def test_requests_that_are_still_open_leave_at_the_end() -> None:
    core = make_core()
    core.add_request(make_request("open", max_tokens=20))
    records = [core.step().record for _ in range(3)]
    session = SessionLoad(core.config)
    for record in records:
        session.add(record)

    [request] = session.load().requests

    assert session.num_open == 1

    assert request.ending is Ending.CLIENT
    assert request.leave_ns is not None
    assert request.leave_ns > records[-1].t_ns
    assert len(request.answer) == 0


def test_requests_that_failed_leave_at_that_moment_and_are_counted() -> None:
    config, records = make_run(3, 150, fail_rate=0.05)
    session = SessionLoad(config)
    for record in records:
        session.add(record)
    failed = {
        event.seq_id
        for record in records
        for event in record.events
        if isinstance(event, Finished) and event.reason == "error"
    }

    endings = Counter(request.ending for request in session.load().requests)

    assert session.num_failed == len(failed) > 0
    assert endings[Ending.CLIENT] >= len(failed)


def test_temperatures_priorities_and_policies_are_taken_over() -> None:
    core = make_core()
    core.add_request(make_request("a", priority=-3))
    core.add_request(make_request("b"))
    policies = Policies("priority", "oldest-first", "auto")
    core.set_policies(policies)
    records = [core.step().record]

    load = read_session(records, core.config, {"a": 0.25})

    assert [(request.priority, request.temperature) for request in load.requests] == [(-3, 0.25), (0, 1.0)]
    assert [policies for _, policies in load.policies] == [policies]
