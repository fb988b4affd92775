"""Native sampling: the tokens of the torch sampler, on every instruction set, in any batch."""

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.kernels.cpu.instruction_sets import runnable
from engine.kernels.cpu.library import Want
from engine.model.sampler import Draw, sample
from engine.model.uniform import uniform
from engine.sampling_params import MAX_COUNT, SamplingParams
from tests.support.kernels import open_library

Array = NDArray[Any]

INSTRUCTION_SETS = sorted({*runnable()[:1], *runnable()[-1:]})
"""The quickest and the plainest that this CPU runs."""

pytestmark = pytest.mark.skipif(not INSTRUCTION_SETS, reason="no instruction set of the kernels on this CPU")

LAST_UNIFORM = 1 - 2.0**-53
NEAR = 1e-6
"""Masses are float32: nearer to the border between two tokens either may be drawn."""


class RefusedError(Exception):
    """An argument that the library does not take."""


class Filters(NamedTuple):
    """Parameters of a draw, one for all rows or one for each."""

    temperature: float | Array = 1.0
    top_k: int | Array = 0
    top_p: float | Array = 1.0


NO_FILTERS = Filters()


class Sampler:
    """`pg_sample` of a compiled library."""

    def __init__(self, isa: str) -> None:
        self._function = open_library(isa).functions.pg_sample

    def __call__(
        self,
        logits: Array,
        uniforms: Any,
        filters: Filters = NO_FILTERS,
        *,
        wants: Any = Want.DRAW,
        threads: int = 1,
    ) -> list[int]:
        """Return a token per row; one row of logits serves all uniform numbers."""
        uniforms = np.atleast_1d(np.asarray(uniforms, dtype=np.float64))  # (rows)
        rows = len(uniforms)
        table = np.ascontiguousarray(np.broadcast_to(logits, (rows, logits.shape[-1])), dtype=np.float32)
        before = table.copy()
        columns = [
            np.array(np.broadcast_to(values, rows), dtype=dtype)
            for values, dtype in zip((wants, *filters), ("u1", "f4", "i4", "f8"), strict=True)
        ]
        token_ids = np.full(rows, -9, dtype=np.int32)
        message = ctypes.create_string_buffer(256)
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (*columns, uniforms, token_ids)]
        code = self._function(
            ctypes.c_void_p(table.ctypes.data), rows, table.shape[-1], *pointers, threads, message
        )
        assert np.array_equal(table, before, equal_nan=True)
        if code != 0:
            raise RefusedError(message.value.decode())
        return [int(token_id) for token_id in token_ids]


_loaded: dict[str, Sampler] = {}


def load(isa: str) -> Sampler:
    if isa not in _loaded:
        _loaded[isa] = Sampler(isa)
    return _loaded[isa]


@pytest.fixture(params=INSTRUCTION_SETS)
def sampler(request: pytest.FixtureRequest) -> Sampler:
    return load(request.param)


def normal(*shape: int, scale: float = 1.0, seed: int = 0) -> Array:
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


def kept(row: Array, filters: Filters) -> tuple[Array, Array]:
    """Return ids and probabilities (float64) of what the filters keep, in the order of drawing: plainly."""
    temperature, top_k, top_p = (
        np.float32(filters.temperature),
        int(filters.top_k),
        float(filters.top_p),
    )
    distances = (row.max() - row) / temperature  # (vocab_size) float32
    masses = np.exp(-distances.astype(np.float64))
    if not 0 < top_k < len(row) and top_p >= 1:
        return np.arange(len(row)), masses / masses.sum()
    ids = np.lexsort((np.arange(len(row)), distances))[: top_k or None]
    masses = masses[ids]
    masses = masses[np.cumsum(masses) - masses < top_p * masses.sum()]
    return ids[: len(masses)], masses / masses.sum()


def assert_drawn(sampler: Sampler, row: Array, uniforms: Array, filters: Filters) -> None:
    """Every number gives the token in whose share of the unit interval it lies."""
    ids, shares = kept(row, filters)
    ends = np.cumsum(shares)
    for number, token_id in zip(uniforms, sampler(row, uniforms, filters), strict=True):
        entry = min(int(np.searchsorted(ends, number, side="right")), len(ids) - 1)
        if np.abs(ends - number).min() > NEAR:
            assert token_id == ids[entry], (len(row), filters, number)


KINDS: dict[str, Callable[[int], Array]] = {
    "flat": normal,
    "peaked": lambda size: normal(size, scale=6),
    "all equal": lambda size: np.full(size, 3.25, dtype=np.float32),
    "few values": lambda size: np.round(normal(size) * 2) / 2,
    "close together": lambda size: normal(size, scale=1e-4),
    "hardly apart": lambda size: (np.arange(size) % 50 * -1e-33).astype(np.float32),
    "signed zeros": lambda size: np.where(np.arange(size) % 2 == 0, 0.0, -0.0).astype(np.float32),
    "one far ahead": lambda size: np.where(np.arange(size) == size // 2, 60.0, normal(size)).astype(
        np.float32
    ),
    "clusters": lambda size: -np.exp(normal(size, scale=8).clip(-40, 4)),
    "mostly banned": lambda size: np.where(np.arange(size) % 7 == size % 7 - 1, normal(size), -np.inf),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab_size", [1, 5, 17, 129, 1003, 5000])
def test_a_number_gives_the_token_in_whose_share_it_lies(
    sampler: Sampler, vocab_size: int, kind: str
) -> None:
    row = KINDS[kind](vocab_size)
    if not np.isfinite(row.max()):
        row[-1] = 1.0
    uniforms = np.concatenate([np.random.default_rng(1).random(20), [0.0, LAST_UNIFORM]])
    for temperature in (1.0, 0.3, 2.0, 2e-3):
        for top_k in (0, 2, 50, vocab_size - 1, MAX_COUNT):
            for top_p in (1.0, 0.93, 0.31):
                assert_drawn(sampler, row, uniforms, Filters(temperature, top_k, top_p))


def is_sampled(size: int) -> NDArray[np.bool_]:
    """Return the tokens of a long row that its sample consists of: every 16th vector of 16."""
    sampled: NDArray[np.bool_] = np.arange(size) // 16 % 16 == 8
    return sampled


# The kernels look at a sample of rows with so many likely tokens first.
LONG_KINDS: dict[str, Callable[[int], Array]] = {
    **KINDS,
    "almost flat": lambda size: normal(size, scale=0.1),
    "two values": lambda size: (np.arange(size) % 3 == 0).astype(np.float32),
    "rising": lambda size: np.linspace(0, 2, size, dtype=np.float32),
    "falling": lambda size: np.linspace(2, 0, size, dtype=np.float32),
    "a head and a flat rest": lambda size: (
        np.where(np.arange(size) % 97 == 0, 5.0, 0.0) + normal(size, scale=0.1)
    ),
    "far below its sample": lambda size: np.where(is_sampled(size), 4.0, 0.0) + normal(size, scale=0.1),
    "far above its sample": lambda size: np.where(is_sampled(size), -4.0, 0.0) + normal(size, scale=0.1),
    "other than an even sample": lambda size: np.where(is_sampled(size), 1.0, normal(size)),
}


@pytest.mark.parametrize("kind", LONG_KINDS)
def test_what_the_sample_of_a_long_row_is_like_makes_no_difference(sampler: Sampler, kind: str) -> None:
    row = LONG_KINDS[kind](20_011).astype(np.float32)
    uniforms = np.concatenate([np.random.default_rng(1).random(12), [0.0, LAST_UNIFORM]])
    for top_k in (0, 3000, 15_000):
        for top_p in (1.0, 0.9999, 0.93, 0.31, 1e-4):
            assert_drawn(sampler, row, uniforms, Filters(1.0, top_k, top_p))


@pytest.mark.parametrize(
    "filters", [Filters(), Filters(0.7, 0, 0.95), Filters(1.0, 50), Filters(2.0, 20_000, 0.9)]
)
def test_a_full_vocabulary_is_drawn_from_like_a_small_one(sampler: Sampler, filters: Filters) -> None:
    for scale in (0.1, 1, 4):
        assert_drawn(sampler, normal(49_152, scale=scale), np.random.default_rng(2).random(40), filters)


@pytest.mark.parametrize(
    "filters", [Filters(0.8), Filters(1.0, 40), Filters(1.5, 0, 0.9), Filters(0.9, 300, 0.8)]
)
def test_evenly_spread_numbers_give_every_token_its_share(sampler: Sampler, filters: Filters) -> None:
    row, num_draws = normal(500, scale=2), 20_000
    ids, shares = kept(row, filters)
    token_ids = sampler(row, (np.arange(num_draws) + 0.5) / num_draws, filters)
    counts = np.bincount(token_ids, minlength=len(row))
    expected = np.zeros(len(row))
    expected[ids] = shares * num_draws
    assert np.abs(counts - expected).max() <= 1 + NEAR * num_draws


def test_tokens_are_those_of_the_torch_sampler(sampler: Sampler) -> None:
    rows, rng = 400, np.random.default_rng(3)
    logits = normal(rows, 2000, scale=3, seed=4)
    filters = Filters(
        rng.uniform(0.2, 2, rows).astype(np.float32),
        rng.choice([0, 1, 3, 60, 700], rows),
        rng.choice([1, 0.9, 0.5], rows),
    )
    draws = [
        Draw(SamplingParams(temperature=float(t), top_k=int(k), top_p=float(p), seed=9), 0, position)
        for position, (t, k, p) in enumerate(zip(*map(np.asarray, filters), strict=True))
    ]
    expected = sample(torch.from_numpy(logits), draws)
    token_ids = sampler(logits, [uniform(9, 0, position) for position in range(rows)], filters)
    # Tokens that are equally likely in float32, not by their logits, may stand in another order.
    assert sum(a == b for a, b in zip(token_ids, expected, strict=True)) >= rows - 2


@pytest.mark.parametrize(("vocab_size", "scale"), [(3001, 2), (20_003, 2), (20_003, 0.1)])
def test_instruction_sets_threads_and_batches_make_no_difference(vocab_size: int, scale: float) -> None:
    rows, rng = 48, np.random.default_rng(5)
    logits = normal(rows, vocab_size, scale=scale, seed=6)
    logits[::5] = np.round(logits[::5])
    logits[1::4] += np.where(is_sampled(vocab_size), 4.0, 0.0)
    logits[2::4] *= 10
    filters = Filters(
        rng.uniform(0.3, 2, rows), rng.choice([0, 20, 1500], rows), rng.choice([1, 0.99, 0.6], rows)
    )
    wants, uniforms = rng.choice([Want.GREEDY, Want.DRAW, Want.DRAW], rows), rng.random(rows)
    expected = load(INSTRUCTION_SETS[0])(logits, uniforms, filters, wants=wants)
    for isa in INSTRUCTION_SETS:
        assert load(isa)(logits, uniforms, filters, wants=wants, threads=2) == expected
        for row in range(rows):
            alone = Filters(*(np.asarray(values)[row] for values in filters))
            assert load(isa)(logits[row], uniforms[row], alone, wants=wants[row]) == [expected[row]]


def test_equally_likely_tokens_are_ranked_by_id(sampler: Sampler) -> None:
    row = np.zeros(1000, dtype=np.float32)
    uniforms = (np.arange(64) + 0.5) / 64
    assert set(sampler(row, uniforms, Filters(top_k=3))) == {0, 1, 2}
    assert set(sampler(row, uniforms, Filters(top_p=0.0035))) == {0, 1, 2, 3}
    row[500] = 1.0
    assert set(sampler(row, uniforms, Filters(top_k=3))) == {500, 0, 1}


def test_top_p_counts_from_what_top_k_has_left(sampler: Sampler) -> None:
    row = np.log(np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32))
    uniforms = (np.arange(64) + 0.5) / 64
    assert set(sampler(row, uniforms, Filters(top_k=2, top_p=0.56))) == {0}  # 0.4 / 0.7 = 0.571
    assert set(sampler(row, uniforms, Filters(top_p=0.56))) == {0, 1}


@pytest.mark.parametrize("want", [Want.GREEDY, Want.DRAW])
@pytest.mark.parametrize("filters", [Filters(), Filters(1.0, 5, 0.9)])
def test_a_row_without_a_finite_largest_logit_fails_alone(
    sampler: Sampler, want: Want, filters: Filters
) -> None:
    logits = normal(5, 300)
    logits[0, 299] = np.nan
    logits[1, 3] = np.inf
    logits[2] = -np.inf
    logits[3, :299] = -np.inf
    token_ids = sampler(logits, np.full(5, 0.5), filters, wants=want)
    assert token_ids[:4] == [-2, -2, -2, 299]
    assert 0 <= token_ids[4] < 300


@pytest.mark.parametrize("vocab_size", [1, 15, 16, 127, 129, 4000])
def test_greedy_takes_the_first_of_the_largest(sampler: Sampler, vocab_size: int) -> None:
    logits = np.round(normal(200, vocab_size))
    assert sampler(logits, np.zeros(200), wants=Want.GREEDY) == logits.argmax(-1).tolist()


def test_rows_of_which_nothing_is_wanted_get_no_token(sampler: Sampler) -> None:
    wants = [Want.NOTHING, Want.GREEDY, Want.NOTHING]
    token_ids = sampler(np.full((3, 4), np.nan), np.zeros(3), wants=wants)
    assert token_ids == [-1, -2, -1]
    assert sampler(np.zeros((0, 4)), np.zeros(0)) == []


@pytest.mark.parametrize(
    ("filters", "number", "field"),
    [
        (Filters(temperature=0.0), 0.5, "temperature of row 0"),
        (Filters(temperature=np.nan), 0.5, "temperature of row 0"),
        (Filters(top_k=-1), 0.5, "top_k of row 0"),
        (Filters(top_p=0.0), 0.5, "top_p of row 0"),
        (Filters(top_p=1.5), 0.5, "top_p of row 0"),
        (Filters(), 1.0, "uniform of row 0"),
        (Filters(), np.nan, "uniform of row 0"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(
    sampler: Sampler, filters: Filters, number: float, field: str
) -> None:
    with pytest.raises(RefusedError, match=f"{field} is out of range; allowed: "):
        sampler(np.zeros(8), number, filters)


def test_sizes_that_make_no_sense_are_refused_by_name(sampler: Sampler) -> None:
    with pytest.raises(RefusedError, match="num_threads is 0"):
        sampler(np.zeros(8), 0.5, threads=0)
    with pytest.raises(RefusedError, match="vocab_size is 0"):
        sampler(np.zeros((1, 0)), 0.5)
    with pytest.raises(RefusedError, match="wants of row 0"):
        sampler(np.zeros(8), 0.5, wants=3)
