import random

import msgspec
import pytest

from engine.errors import ConfigError
from engine.records import BatchEntry, RecordKind, StepRecord
from engine.scheduling.output import ScheduledSequence, SchedulerOutput
from engine.sequence import Sequence
from engine.simulate.costs import (
    MAX_GAP_NS,
    CostFit,
    StepCosts,
    StepWork,
    fit_costs,
    planned_work,
    recorded_work,
    whole_ns,
)
from tests.builders import make_request

COSTS = StepCosts(
    step_ns=3e6,
    prefill_token_ns=300_000,
    decode_token_ns=900_000,
    context_token_ns=800,
    prefill_pair_ns=90,
    copied_block_ns=60_000,
)


def make_record(step: int = 1, batch: list[BatchEntry] | None = None, **fields: object) -> StepRecord:
    values = dict.fromkeys(StepRecord.__struct_fields__, 0)
    lists = {"batch": batch or [], "block_ops": [], "events": [], "prefix_pending": []}
    return StepRecord(**{**values, **lists, "step": step, "kind": RecordKind.STEP, **fields})  # type: ignore[arg-type]


def random_work(rng: random.Random) -> StepWork:
    prefill, decode = rng.choice([0, 0, 64, 200, 256]), rng.randrange(64)
    return StepWork(
        1, prefill, decode, decode * rng.randrange(20, 900), prefill * rng.randrange(200), rng.randrange(3)
    )


def test_the_fit_recovers_the_costs_that_made_the_durations() -> None:
    rng = random.Random(1)
    works = [random_work(rng) for _ in range(200)]

    fitted = fit_costs([(work, round(COSTS.reckon_ns(work))) for work in works])

    for name, value in msgspec.structs.asdict(COSTS).items():
        assert getattr(fitted, name) == pytest.approx(value, rel=1e-3), name


def test_no_cost_is_negative_whatever_the_noise() -> None:
    rng = random.Random(2)
    for _ in range(20):
        samples = [(random_work(rng), rng.randrange(1, 10**8)) for _ in range(30)]
        assert min(msgspec.structs.astuple(fit_costs(samples))) >= 0


def test_all_steps_together_take_as_long_as_they_did_whatever_stalled() -> None:
    rng = random.Random(3)
    works = [random_work(rng) for _ in range(60)]
    samples = [(work, round(COSTS.reckon_ns(work) * rng.choice([1, 1, 1, 6]))) for work in works]

    fitted = fit_costs(samples)

    total_ns = sum(duration_ns for _, duration_ns in samples)
    assert sum(fitted.reckon_ns(work) for work in works) == pytest.approx(total_ns)


def test_what_never_happened_costs_nothing_and_what_always_happens_together_is_told_once() -> None:
    samples = [(StepWork(num_steps=1, num_decode_tokens=1, num_context_tokens=50), 4_000_000)] * 30

    fitted = fit_costs(samples)

    assert fitted.prefill_token_ns == fitted.copied_block_ns == 0
    assert fitted.reckon_ns(samples[0][0]) == pytest.approx(4_000_000)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="Only 1 steps are recorded; costs need 20"):
        fit_costs([(StepWork(1), 5), (StepWork(1), 0)])


def test_a_planned_step_and_its_record_are_the_same_work() -> None:
    chunk, decode = Sequence(1, make_request(prompt=40), 4), Sequence(2, make_request(prompt=9), 4)
    output = SchedulerOutput([ScheduledSequence(chunk, 10, 20), ScheduledSequence(decode, 8, 1)])
    record = make_record(batch=[BatchEntry(1, 0, 10, 20), BatchEntry(2, 1, 8, 1, 7)])

    assert planned_work(output) == recorded_work(record) == StepWork(1, 20, 1, 9, 20 * 10 + 210, 0)


def test_a_step_lasts_until_the_next_one_unless_nothing_was_to_be_done() -> None:
    record = make_record(forward_ns=5_000_000, t_ns=100, num_running=1)
    idle = msgspec.structs.replace(record, num_running=0)

    assert whole_ns(record, 6_000_100) == 6_000_000
    assert whole_ns(record, 5_000_200 + MAX_GAP_NS) == 5_000_000
    assert whole_ns(idle, 6_000_100) == 5_000_000


def test_steps_are_taken_from_records_and_gaps_do_not_count() -> None:
    fit = CostFit()
    batch = [BatchEntry(1, 0, 8, 1, 7)]
    for step in [*range(1, 25), *range(40, 45)]:
        fit.add(make_record(step, batch, t_ns=step * 3_000_000, forward_ns=2_000_000, num_running=1))

    fitted = fit.fit()

    assert fit.num_steps == 28
    assert fitted.reckon_ns(StepWork(1, 0, 1, 9)) == pytest.approx(3_000_000, rel=0.03)
