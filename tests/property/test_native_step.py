"""The native step on random shapes: close to the torch oracle, and the same bits however it is cut up."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.kernels.cpu.instruction_sets import runnable
from engine.kernels.cpu.library import NativeModel, NativeSizes, Want
from engine.model.decoder import Decoder
from engine.runner.batch import make_inputs
from engine.sampling_params import SamplingParams
from engine.scheduling.output import ScheduledSequence
from engine.sequence import EngineRequest, Sequence
from tests.support.native import Floats, Shape, Share, TinyModel, step

pytestmark = pytest.mark.skipif(not runnable(), reason="this CPU runs none of the native kernels")

ISAS = [isa for isa in runnable() if isa != "avx2vnni"]  # differs from avx2 in one integer instruction
BEST = ISAS[0] if ISAS else ""

# Root mean square of the logits' differences, in standard deviations of the logits. Queries and KV are
# bfloat16 in all; what is left in fp32 is their rounding, the others add that of activations and weights.
TOLERANCE = {"fp32": 0.012, "bf16": 0.025, "int8": 0.06, "q4": 0.05}

SHAPES = {
    "tied": Shape(),
    "one kv head, untied": Shape(num_kv_heads=1, is_tied=False),
    "no grouping, biases": Shape(num_kv_heads=4, has_biases=True),
    "head norms, wide heads": Shape(head_dim=80, has_head_norms=True, is_tied=False),
    "three to one": Shape(hidden_size=96, num_heads=9, num_kv_heads=3, head_dim=64, intermediate_size=160),
}
ODD = {
    "odd sizes": Shape(hidden_size=72, intermediate_size=90, num_heads=5, num_kv_heads=1, vocab_size=67),
    "sixteen to one": Shape(hidden_size=50, num_heads=16, num_kv_heads=1, vocab_size=33, head_dim=48),
}
STORED = {"q4": ("Q4_0", "Q4_1"), "int8": ("Q8_0", "F32"), "bf16": ("F32",), "fp32": ("F32",)}


def sizes_of(dtype: str, **changes: Any) -> NativeSizes:
    sizes = NativeSizes(
        num_positions=1100, block_size=16, num_blocks=256, dtype=dtype, kv_dtype="bf16", num_threads=2
    )
    return replace(sizes, **changes)


def token_ids_of(seed: int, count: int, vocab_size: int) -> list[int]:
    return random.Random(seed).choices(range(vocab_size), k=count)


@torch.inference_mode()
def oracle_logits(decoder: Decoder, token_ids: list[int]) -> Floats:
    request = EngineRequest(request_id="r", prompt_token_ids=token_ids, sampling_params=SamplingParams())
    sequence = Sequence(0, request, max_tokens=1)
    sequence.block_table = list(range(-(-len(token_ids) // 16)))
    batch = decoder.make_batch(make_inputs([ScheduledSequence(sequence, 0, len(token_ids))], 16))
    batch.logits_rows = torch.arange(len(token_ids))
    logits: Floats = decoder.forward(batch, decoder.make_cache(128, 16)).numpy()
    return logits


def solo(model: NativeModel, token_ids: list[int], first_block: int = 0) -> Floats:
    """Return the logits of a text computed alone, in one step, over NaN."""
    model.view_kv()[:] = 0xFF
    num_blocks = -(-len(token_ids) // model.sizes.block_size)
    table = list(range(first_block, first_block + num_blocks))
    return step(model, [Share(token_ids, 0, len(token_ids), table)])[0]


def distance(got: Floats, expected: Floats) -> float:
    return float(np.sqrt(np.square(got - expected).mean()) / expected.std())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("name", [*SHAPES, *ODD])
def test_logits_are_near_the_oracle(isa: str, dtype: str, name: str) -> None:
    if dtype == "q4" and name in ODD:
        return  # four-bit rows are whole groups of 32
    shape = {**SHAPES, **ODD}[name]
    for stored in STORED[dtype]:
        if stored != "F32" and name in ODD:
            continue
        model = TinyModel(shape, stored, seed=3)
        token_ids = token_ids_of(1, 70, shape.vocab_size)
        expected = oracle_logits(model.make_decoder(), token_ids)
        got = solo(model.make_native(isa, sizes_of(dtype)), token_ids)
        assert distance(got, expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("size", [0.1, 1.0, 10.0, 100.0, 1e4, 1e30, 1e37])
def test_the_gates_function_is_near_the_oracle_from_end_to_end(isa: str, size: float) -> None:
    """Without attention, which rounds to bfloat16, little room is left; the largest gates are negative."""
    model = TinyModel(SHAPES["one kv head, untied"], seed=3)
    model.weights["embed"] = np.abs(model.weights["embed"])
    for layer in range(2):
        model.weights[f"{layer}.o"][:] = 0
        gate = model.weights[f"{layer}.gate"] * np.float32(size)
        model.weights[f"{layer}.gate"] = -np.abs(gate) if size > 1e4 else gate
        model.weights[f"{layer}.down"] *= 0.1 / max(1.0, min(size, 1e4))
    token_ids = token_ids_of(1, 40, 100)
    expected = oracle_logits(model.make_decoder(), token_ids)
    got = solo(model.make_native(isa, sizes_of("fp32")), token_ids)
    assert distance(got, expected) <= 1e-6


def test_a_long_context_is_near_the_oracle() -> None:
    model = TinyModel(SHAPES["three to one"], seed=4)
    token_ids = token_ids_of(2, 1000, 100)
    expected = oracle_logits(model.make_decoder(), token_ids)
    got = solo(model.make_native(BEST, sizes_of("fp32")), token_ids)
    assert distance(got, expected) <= TOLERANCE["fp32"]


@st.composite
def cases(draw: st.DrawFn) -> tuple[TinyModel, NativeSizes, int]:
    """A model, how it is run, and a seed for what it computes."""
    dtype = draw(st.sampled_from(sorted(STORED)))
    stored = draw(st.sampled_from(STORED[dtype]))
    group = draw(st.sampled_from([1, 2, 3, 5]))
    num_kv_heads = draw(st.integers(1, 3))
    width = st.integers(1, 3).map(lambda n: 32 * n) if stored != "F32" else st.integers(20, 100)
    head_dim = draw(st.sampled_from([16, 32, 48, 64, 80]))
    num_heads = group * num_kv_heads
    if stored != "F32" and num_heads * head_dim % 32:
        head_dim = 32
    shape = Shape(
        hidden_size=draw(width), intermediate_size=draw(width), num_layers=draw(st.integers(1, 3)),
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
        vocab_size=draw(st.integers(17, 130)), is_tied=draw(st.booleans()),
        has_biases=draw(st.booleans()), has_head_norms=draw(st.booleans()),
    )  # fmt: skip
    block_size = draw(st.sampled_from([1, 4, 7, 16, 32, 48]))
    num_blocks = 3000 // block_size
    kv_dtype = draw(st.sampled_from(["bf16", "bf16", "int8"]))
    sizes = sizes_of(
        dtype, block_size=block_size, num_blocks=num_blocks, kv_dtype=kv_dtype,
        num_threads=draw(st.sampled_from([2, 2, 3])),
    )  # fmt: skip
    return TinyModel(shape, stored, seed=draw(st.integers(0, 1000))), sizes, draw(st.integers(0, 2**20))


class Run:
    """Random texts, some with a common beginning, computed in random chunks and batches."""

    def __init__(self, model: NativeModel, seed: int) -> None:
        self.model = model
        self.rng = random.Random(seed)
        vocab_size, block_size = model.config.vocab_size, model.sizes.block_size
        self.free = self.rng.sample(range(model.sizes.num_blocks), model.sizes.num_blocks)
        shared_blocks = self.rng.choice([0, 1, 300 // block_size + 1])
        self.prefix = self.rng.choices(range(vocab_size), k=shared_blocks * block_size)
        self.prefix_table = [self.free.pop() for _ in range(shared_blocks)]
        self.texts: list[list[int]] = []
        self.tables: list[list[int]] = []
        self.computed: list[int] = []
        for index in range(self.rng.randint(2, 6)):
            own = self.rng.choices(range(vocab_size), k=self.rng.randint(1, 90))
            text = [*self.prefix, *own] if index % 2 == 0 else own
            shared = list(self.prefix_table) if index % 2 == 0 else []
            count = -(-len(text) // block_size)
            self.tables.append(shared + [self.free.pop() for _ in range(count - len(shared))])
            self.texts.append(text)
            self.computed.append(0)

    def logits(self) -> list[Floats]:
        """Compute everything; return each text's logits. The first text computes shared blocks for all."""
        vocab_size = self.model.config.vocab_size
        parts: list[list[Floats]] = [[] for _ in self.texts]
        self._finish(0, parts)
        for index in range(2, len(self.texts), 2):
            self.computed[index] = len(self.prefix)
            parts[index].append(np.concatenate(parts[0])[: len(self.prefix)])
        while open_ones := [i for i, text in enumerate(self.texts) if self.computed[i] < len(text)]:
            chosen = self.rng.sample(open_ones, self.rng.randint(1, len(open_ones)))
            self._compute([(i, self.rng.choice([1, 1, 2, 13, 64])) for i in chosen], parts)
        return [np.concatenate(part).reshape(-1, vocab_size) for part in parts]

    def _finish(self, index: int, parts: list[list[Floats]]) -> None:
        while self.computed[index] < len(self.texts[index]):
            self._compute([(index, self.rng.choice([1, 30, 200]))], parts)

    def _compute(self, wanted: list[tuple[int, int]], parts: list[list[Floats]]) -> None:
        shares = []
        for index, count in wanted:
            start = self.computed[index]
            end = min(start + count, len(self.texts[index]))
            shares.append(
                Share(self.texts[index], start, end, self.tables[index], self.rng.choice(list(Want)))
            )
            self.computed[index] = end
        logits, _ = step(self.model, shares)
        row = 0
        for (index, _), share in zip(wanted, shares, strict=True):
            parts[index].append(logits[row : row + share.end - share.start])
            row += share.end - share.start


@given(cases())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_bits_are_the_same_alone_batched_chunked_shared_and_with_any_number_of_threads(
    case: tuple[TinyModel, NativeSizes, int],
) -> None:
    tiny, sizes, seed = case
    model = tiny.make_native(BEST, sizes)
    run = Run(model, seed)
    together = run.logits()
    one_thread = tiny.make_native(BEST, replace(sizes, num_threads=1))
    for text, got in zip(run.texts, together, strict=True):
        expected = solo(one_thread, text)
        assert np.isfinite(expected).all()
        np.testing.assert_array_equal(got, expected)


@given(cases())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_other_instruction_sets_give_the_same_bits(case: tuple[TinyModel, NativeSizes, int]) -> None:
    tiny, sizes, seed = case
    token_ids = token_ids_of(seed, 110, tiny.shape.vocab_size)  # threads share these out by rows
    expected = solo(tiny.make_native(BEST, sizes), token_ids)
    for isa in ISAS[1:]:
        np.testing.assert_array_equal(solo(tiny.make_native(isa, sizes), token_ids), expected)
