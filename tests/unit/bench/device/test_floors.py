import pytest

from bench.costs import Cost
from bench.device.ceilings import Ceilings
from bench.device.engines import Run
from bench.device.floors import costs_of, floors_s, is_full_decode
from bench.device.shapes import LLAMA_32_1B, QWEN3_06B
from bench.device.throughput import describe, describe_prefill
from engine.records import BatchEntry, StepRecord
from tests.support.step_records import make_record

pytestmark = pytest.mark.unit

FAST = Ceilings(copy_gb_s=1.0, matmul_tflops=1e9)
"""Memory is all that takes time."""


def make_decode(num_seqs: int, context: int) -> StepRecord:
    return make_record(batch=[BatchEntry(i, i, context - 1, 1, token_id=7) for i in range(num_seqs)])


def test_a_floor_is_the_larger_of_moving_and_computing() -> None:
    ceilings = Ceilings(copy_gb_s=2.0, matmul_tflops=3.0)
    assert ceilings.floor_s(4e9, 3e12) == 2.0
    assert ceilings.floor_s(4e9, 12e12) == 4.0


def test_a_decode_step_reads_all_weights_and_all_keys_and_values() -> None:
    config, costs = QWEN3_06B, costs_of(QWEN3_06B)
    (floor_s,) = floors_s(costs, [make_decode(256, 1000)], FAST)
    layer = 2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072
    weights = 2 * (28 * layer + config.vocab_size * 1024)
    kv = 256 * 1000 * config.kv_bytes_per_token(2)
    assert floor_s == pytest.approx((weights + kv) / 1e9)


def test_operations_count_where_there_are_enough_of_them() -> None:
    slow = Ceilings(copy_gb_s=1e9, matmul_tflops=1.0)
    (floor_s,) = floors_s(costs_of(LLAMA_32_1B), [make_decode(64, 500)], slow)
    total = sum(costs_of(LLAMA_32_1B).of_step([]).values(), Cost())
    assert total == Cost()
    layer = 2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192
    products = 2 * 64 * (16 * layer + 128_256 * 2048)
    attention = 64 * 16 * 4 * 2048 * 500
    assert floor_s == pytest.approx((products + attention) / 1e12)


def test_a_record_without_a_batch_takes_no_time() -> None:
    assert floors_s(costs_of(QWEN3_06B), [make_record(batch=[])], FAST) == [0.0]


def test_a_full_decode_step_has_all_sequences_and_nothing_else() -> None:
    assert is_full_decode(make_decode(4, 10), 4)
    assert not is_full_decode(make_decode(3, 10), 4)
    mixed = [*make_decode(3, 10).batch, BatchEntry(9, 9, 0, 5, token_id=3)]
    assert not is_full_decode(make_record(batch=mixed), 4)


def test_figures_of_a_run_are_about_its_time_and_its_full_steps() -> None:
    decode, prefill = make_decode(2, 100), make_record(batch=[BatchEntry(0, 0, 0, 50)])
    floors = floors_s(costs_of(QWEN3_06B), [prefill, decode, decode], FAST)
    run = Run([prefill, decode, decode], [2.0, 4.0, 6.0], {"0": [1] * 20, "1": [1] * 40}, is_complete=True)
    figures = describe(run, costs_of(QWEN3_06B), FAST, 2)
    assert figures["output_tok_s"] == 5.0
    assert figures["roofline_percent"] == pytest.approx(100 * sum(floors) / 12)
    assert figures["full_decode_steps"] == 2
    assert figures["full_decode_roofline_percent"] == pytest.approx(100 * 2 * floors[1] / 10)
    assert describe_prefill(run, costs_of(QWEN3_06B), FAST)["tok_s"] == pytest.approx(54 / 12)


def test_a_run_that_never_began_has_no_figures() -> None:
    assert describe(Run(), costs_of(QWEN3_06B), FAST, 2) == {"is_complete": False, "output_tokens": 0}
    assert describe_prefill(Run(), costs_of(QWEN3_06B), FAST) == {"is_complete": False, "tokens": 0}
