"""Numbers that are none, and numbers at the edges of their formats."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.kernels.cpu.instruction_sets import runnable
from engine.kernels.cpu.library import NativeModel, NativeSizes, StepBatch, Want
from tests.support.native import Shape, Share, TinyModel, step

pytestmark = pytest.mark.skipif(not runnable(), reason="this CPU runs none of the native kernels")

SIZES = NativeSizes(
    num_positions=128, block_size=16, num_blocks=16, dtype="int8", kv_dtype="bf16", num_threads=1
)
TOKEN_IDS = list(range(40))
TABLE = [3, 1, 2]
FAILED = -2


def next_token(model: NativeModel, token_ids: list[int]) -> int:
    """Return the greedy token as it is found while logits are computed, none of which is written."""
    batch = StepBatch()
    batch.token_ids.fromlist(token_ids)
    batch.num_computed.append(0)
    batch.num_scheduled.append(len(token_ids))
    batch.tables.fromlist(TABLE)
    batch.table_starts.append(3)
    batch.wants.append(Want.GREEDY)
    for values, value in ((batch.temperatures, 1.0), (batch.top_ps, 1.0), (batch.uniforms, 0.5)):
        values.append(value)
    batch.top_ks.append(0)
    return model.step(batch).token_ids[0]


def next_tokens(tiny: TinyModel, isa: str, sizes: NativeSizes) -> tuple[int, int]:
    """Return the greedy token as the fused search finds it, and as it is found in written logits."""
    model = tiny.make_native(isa, sizes)
    fused = next_token(model, TOKEN_IDS)
    _, written = step(model, [Share(TOKEN_IDS, 0, len(TOKEN_IDS), TABLE)])
    return fused, written[0]


@pytest.mark.parametrize("isa", [name for name in runnable() if name != "avx512vnni"])
@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
@pytest.mark.parametrize("dtype", ["int8", "bf16", "fp32"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "name", ["0.attn_norm", "0.q", "0.k", "0.v", "0.gate", "1.down", "1.o", "final_norm"]
)
def test_a_weight_that_is_no_number_gives_no_token(
    isa: str, kv_dtype: str, dtype: str, bad: float, name: str
) -> None:
    tiny = TinyModel(Shape(), seed=5)
    tiny.weights[name].flat[0] = bad
    assert next_tokens(tiny, isa, replace(SIZES, dtype=dtype, kv_dtype=kv_dtype)) == (FAILED, FAILED)


@pytest.mark.parametrize("isa", runnable())
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_gate_of_minus_infinity_is_not_taken_for_a_closed_one(isa: str, dtype: str) -> None:
    tiny = TinyModel(Shape(is_tied=False), seed=5)
    tiny.weights["embed"] = np.abs(tiny.weights["embed"])
    tiny.weights["0.o"][:] = 0
    tiny.weights["0.gate"][0] = -np.inf
    assert next_tokens(tiny, isa, replace(SIZES, dtype=dtype)) == (FAILED, FAILED)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_logit_that_is_no_number_counts_in_the_last_column_too(bad: float) -> None:
    tiny = TinyModel(Shape(vocab_size=99, is_tied=False), seed=5)
    tiny.weights["head"][98, 0] = bad
    fused, written = next_tokens(tiny, runnable()[0], replace(SIZES, dtype="fp32"))
    assert fused == written
    if np.isnan(bad):
        assert fused == FAILED


@pytest.mark.parametrize("isa", runnable())
@pytest.mark.parametrize("vocab_size", [2, 3, 15, 16, 17, 31, 33, 49, 64])
def test_what_pads_the_vocabulary_is_never_the_next_token(isa: str, vocab_size: int) -> None:
    """Padding has logits of 0, which is the largest where all real ones are negative."""
    token_ids, sizes = [i % vocab_size for i in range(8)], replace(SIZES, dtype="fp32")
    share = Share(token_ids, 0, len(token_ids), TABLE)
    for seed in range(4):
        tiny = TinyModel(Shape(vocab_size=vocab_size, is_tied=False), seed=seed)
        before, _ = step(tiny.make_native(isa, sizes), [share])
        tiny.weights["head"][before[-1] > 0] *= -1
        model = tiny.make_native(isa, sizes)
        fused = next_token(model, token_ids)
        logits, written = step(model, [share])
        assert logits[-1].max() < 0
        assert fused == written[0] == int(logits[-1].argmax())


def q4_1_block(scale: float, minimum: float, rng: np.random.Generator) -> Any:
    codes = rng.integers(0, 256, 16, dtype=np.uint8)
    return np.concatenate([np.array([scale, minimum], dtype=np.float16).view(np.uint8), codes])


@pytest.mark.parametrize(
    ("scale", "minimum"),
    [
        (0.0, 0.1), (0.0, 0.0), (0.02, 0.0), (0.02, -0.3), (0.001, 0.2), (0.001, -0.099),
        (-0.02, 0.15), (6e-8, 7e-6), (1.2e-7, -2e-5), (6e-8, 6e-8), (60.0, -800.0),
    ],
)  # fmt: skip
def test_strange_groups_of_four_bits_are_kept_and_are_the_same_bits_in_any_chunks(
    scale: float, minimum: float
) -> None:
    rng = np.random.default_rng(1)
    tiny = TinyModel(Shape(), "Q4_1", seed=5)
    raw = tiny.raw["0.down"].reshape(-1, 20)
    for row in range(0, len(raw), 3):
        raw[row] = q4_1_block(scale, minimum, rng)
    halves = raw[:, :4].copy().view(np.float16).astype(np.float32)  # (blocks, 2)
    codes = np.concatenate([raw[:, 4:] & 15, raw[:, 4:] >> 4], axis=1)  # (blocks, 32)
    exact = codes * halves[:, :1] + halves[:, 1:]  # (blocks, 32)
    tiny.weights["0.down"] = exact.reshape(tiny.weights["0.down"].shape).astype(np.float32)
    sizes = replace(SIZES, dtype="q4")
    table = [3, 1, 2]
    whole, _ = step(tiny.make_native(runnable()[0], sizes), [Share(TOKEN_IDS, 0, 40, table)])
    for isa in runnable():
        model = tiny.make_native(isa, sizes)
        parts = [step(model, [Share(TOKEN_IDS, i, i + 1, table)])[0] for i in range(40)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)
    expected, _ = step(
        tiny_as_float(tiny).make_native(runnable()[0], replace(SIZES, dtype="fp32")),
        [Share(TOKEN_IDS, 0, 40, table)],
    )
    distance = np.sqrt(np.square(whole - expected).mean()) / expected.std()
    assert distance < 0.08


def tiny_as_float(tiny: TinyModel) -> TinyModel:
    other = TinyModel(tiny.shape, seed=tiny.seed)
    other.weights = tiny.weights
    return other
