from dataclasses import replace

import pytest

from bench.costs import ATTENTION, HEAD, PARTS, Cost, ModelCosts, Work
from tests.support.headers import HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, LAYERS, VOCAB, make_files

pytestmark = pytest.mark.unit

QKV_NUMBERS = (HEADS + 2 * KV_HEADS) * HEAD_DIM * HIDDEN


def test_a_floor_is_the_larger_of_memory_and_arithmetic() -> None:
    assert Cost(400.0, 100.0).floor_ns(gb_s=40.0, gops=100.0) == 10.0
    assert Cost(400.0, 3000.0).floor_ns(gb_s=40.0, gops=100.0) == 30.0


def test_every_part_has_a_cost() -> None:
    assert tuple(ModelCosts(make_files(), "q4", "bf16").of_step([Work(5, 1, is_wanted=True)])) == PARTS


@pytest.mark.parametrize(("stored", "dtype", "bytes_per_number"), [
    ("Q4_0", "q4", 18 / 32), ("Q4_1", "q4", 20 / 32), ("Q8_0", "q4", 34 / 32), ("F16", "int8", 34 / 32),
    ("Q4_1", "bf16", 2.0), ("F16", "fp32", 4.0),
])  # fmt: skip
def test_weights_are_read_once_in_the_format_that_they_are_packed_in(
    stored: str, dtype: str, bytes_per_number: float
) -> None:
    costs = ModelCosts(make_files(stored), dtype, "bf16")
    for count in (1, 50):
        qkv = costs.of_step([Work(0, count, is_wanted=True)])["qkv"]
        assert qkv.num_bytes == LAYERS * QKV_NUMBERS * bytes_per_number
        assert qkv.operations == 2 * LAYERS * QKV_NUMBERS * count


def test_weights_that_are_packed_together_in_spite_of_their_types_are_int8() -> None:
    costs = ModelCosts(make_files("Q4_1", up="Q8_0"), "q4", "bf16").of_step([Work(0, 1, is_wanted=True)])
    assert costs["gate_up"].num_bytes == LAYERS * 2 * INNER * HIDDEN * 34 / 32
    assert costs["down"].num_bytes == LAYERS * INNER * HIDDEN * 20 / 32


def test_the_last_layer_and_the_head_compute_wanted_tokens_only() -> None:
    costs = ModelCosts(make_files(), "q4", "bf16")
    step = costs.of_step([Work(0, 10, is_wanted=False), Work(4, 7, is_wanted=True)])
    assert step["down"].operations == 2 * INNER * HIDDEN * ((LAYERS - 1) * 17 + 1)
    assert step[HEAD].operations == 2 * VOCAB * HIDDEN
    without = costs.of_step([Work(0, 10, is_wanted=False)])
    assert without[HEAD] == Cost()
    assert without["down"].num_bytes == (LAYERS - 1) * INNER * HIDDEN * 20 / 32


def test_tokens_see_what_was_before_them() -> None:
    costs = ModelCosts(make_files(), "q4", "bf16").of_step([Work(10, 3, is_wanted=True)])
    seen = (LAYERS - 1) * (11 + 12 + 13) + 13
    assert costs[ATTENTION].operations == 4 * HEADS * HEAD_DIM * seen
    assert costs[ATTENTION].num_bytes == LAYERS * 13 * 2 * KV_HEADS * HEAD_DIM * 2


def test_an_int8_cache_has_a_scale_per_head() -> None:
    costs = ModelCosts(make_files(), "q4", "int8").of_step([Work(9, 1, is_wanted=True)])
    assert costs[ATTENTION].num_bytes == LAYERS * 10 * 2 * KV_HEADS * (HEAD_DIM + 4)


def test_an_untied_head_is_the_one_that_is_read() -> None:
    files = make_files("Q4_1", embed="F16")
    untied = replace(files, config=replace(files.config, tied_embeddings=False))
    untied.weights["head.weight"] = replace(files.weights["embed.weight"], dtype="Q4_0")
    costs = ModelCosts(untied, "q4", "bf16").of_step([Work(0, 1, is_wanted=True)])
    assert costs[HEAD].num_bytes == VOCAB * HIDDEN * 18 / 32
