import pytest

from bench.costs import PARTS, ModelCosts, Work
from bench.roofline import Limits, floors_ns, own_limits
from engine.records import BatchEntry, RecordKind, StepRecord, StopReason
from tests.support.headers import make_files

pytestmark = pytest.mark.unit


def make_record(*batch: BatchEntry) -> StepRecord:
    return StepRecord(
        step=0, kind=RecordKind.STEP, t_ns=0, schedule_ns=0, forward_ns=0, sample_ns=0, host_ns=0,
        batch=list(batch), block_ops=[], events=[], stop_reason=StopReason.QUEUE_EMPTY, prefix_pending=[],
        token_budget=512, num_running=0, num_waiting=0, num_free=0, num_cached=0, num_used=0,
    )  # fmt: skip


def test_floors_are_summed_over_the_steps_part_by_part() -> None:
    costs, limits = ModelCosts(make_files(), "q4", "bf16"), Limits(gb_s=30.0, gops=900.0)
    records = [
        make_record(BatchEntry(1, 0, 0, 40, -1)),
        make_record(),
        make_record(BatchEntry(1, 0, 40, 8, 5), BatchEntry(2, 1, 7, 1, 3)),
    ]
    batches = [[Work(0, 40, is_wanted=False)], [Work(40, 8, is_wanted=True), Work(7, 1, is_wanted=True)]]
    floors = floors_ns(costs, records, dict.fromkeys(PARTS, limits))
    assert tuple(floors) == PARTS
    for part, floor in floors.items():
        expected = [costs.of_step(batch)[part].floor_ns(gb_s=30.0, gops=900.0) for batch in batches]
        assert floor == pytest.approx(sum(expected))


def test_a_step_of_few_tokens_is_bound_by_memory_and_one_of_many_by_arithmetic() -> None:
    costs = ModelCosts(make_files(), "q4", "bf16")

    def floor(num_tokens: int, gb_s: float, gops: float) -> float:
        record = make_record(BatchEntry(1, 0, 0, num_tokens, 1))
        return floors_ns(costs, [record], dict.fromkeys(PARTS, Limits(gb_s, gops)))["gate_up"]

    assert floor(1, 30.0, 900.0) == 2 * floor(1, 60.0, 900.0) == floor(1, 30.0, 1800.0)
    assert floor(200, 30.0, 900.0) == 2 * floor(200, 30.0, 1800.0) == floor(200, 60.0, 900.0)


def test_what_scales_a_group_takes_multiplications_from_its_products() -> None:
    limits = own_limits("q4", read_gb_s=34.0, gops=945.0, bf16_gflops=470.0)
    assert (limits["down"].gops, limits["qkv"].gops) == pytest.approx((720.0, 720.0))
    assert limits["head"].gops == pytest.approx(756.0)  # int8: no zero points
    assert limits["attention"] == Limits(34.0, 470.0)
    assert {limit.gb_s for limit in limits.values()} == {34.0}
    assert own_limits("bf16", read_gb_s=34.0, gops=470.0, bf16_gflops=470.0)["down"] == Limits(34.0, 470.0)
