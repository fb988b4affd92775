"""Choosing tokens: distributions, filters, and independence of the batch."""

import math
from typing import Any

import pytest
import torch

from engine.model.sampler import Draw, sample
from engine.model.uniform import uniform
from engine.records import FAILED_TOKEN_ID
from engine.sampling_params import MAX_COUNT, SamplingParams

VOCAB_SIZE = 1000
NUM_DRAWS = 20_000


def draw(position: int = 0, choice_index: int = 0, **params: Any) -> Draw:
    return Draw(SamplingParams(**{"seed": 1, **params}), choice_index, position)


def random_logits(rows: int, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def frequencies(logits: torch.Tensor, **params: Any) -> torch.Tensor:
    """Return how often each token comes up over many positions, on one row of logits."""
    counts = torch.zeros(logits.shape[-1])
    for start in range(0, NUM_DRAWS, 2000):
        draws = [draw(position, **params) for position in range(start, start + 2000)]
        token_ids = sample(logits.expand(2000, -1), draws)
        counts += torch.bincount(torch.tensor(token_ids), minlength=logits.shape[-1])
    return counts


def assert_follows(counts: torch.Tensor, expected: torch.Tensor) -> None:
    """Chi-square against probabilities; the bound is about five standard deviations of the statistic."""
    assert counts[expected == 0].sum() == 0
    wanted = expected * NUM_DRAWS
    common = wanted >= 5
    statistic = ((counts - wanted)[common] ** 2 / wanted[common]).sum().item()
    rest = wanted[~common].sum().item()
    if rest > 5:
        statistic += (counts[~common].sum().item() - rest) ** 2 / rest
    freedom = int(common.sum())
    assert statistic < freedom + 5 * math.sqrt(2 * freedom) + 5


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("vocab_size", [7, 256, 700])
def test_draws_follow_the_distribution(temperature: float, vocab_size: int) -> None:
    logits = random_logits(1, vocab_size, seed=vocab_size)[0] / 2
    expected = (logits.double() / temperature).softmax(-1).float()
    assert_follows(frequencies(logits, temperature=temperature), expected)


def filtered(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Return the distribution after top-k and then top-p, in the plainest way."""
    probs = logits.double().softmax(-1)
    order = probs.argsort(descending=True)
    kept = order[: top_k or None]
    total = probs[kept].sum()
    result = torch.zeros_like(probs)
    mass = 0.0
    for token_id in kept.tolist():
        if mass >= top_p * total:
            break
        result[token_id] = probs[token_id]
        mass += probs[token_id].item()
    return (result / result.sum()).float()


@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [(5, 1.0), (0, 0.8), (10, 0.7), (400, 0.9), (400, 1.0), (0, 0.9999), (5000, 0.5)],
)
def test_filters_keep_the_right_tokens_in_the_right_proportions(top_k: int, top_p: float) -> None:
    logits = random_logits(1, seed=3)[0] / 2  # flat enough for nuclei wider than the quick path's candidates
    assert_follows(frequencies(logits, top_k=top_k, top_p=top_p), filtered(logits, top_k, top_p))


def test_greedy_rows_take_the_maximum_whatever_else_is_in_the_batch() -> None:
    logits = random_logits(4)
    draws = [
        draw(temperature=0.0),
        draw(temperature=1.0),
        draw(temperature=1.5, top_k=1),
        draw(temperature=1e-4),
    ]
    token_ids = sample(logits, draws)
    best = logits.argmax(-1).tolist()
    assert [token_ids[0], *token_ids[2:]] == [best[0], *best[2:]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_temperatures_are_finite_and_pick_the_best(dtype: torch.dtype) -> None:
    logits = (random_logits(1) * 1000).to(dtype)
    for temperature in (0.0, 1e-7, 1e-5, 1e-4, 1e-3, 2e-3, 1e-2):
        assert sample(logits, [draw(temperature=temperature)]) == [int(logits.argmax())]


def test_a_tiny_top_p_leaves_the_best_token() -> None:
    logits = random_logits(50)
    draws = [draw(position, temperature=2.0, top_p=1e-9) for position in range(50)]
    assert sample(logits, draws) == logits.argmax(-1).tolist()


def mixed_draws() -> list[Draw]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 40},
        {"temperature": 2.0, "top_p": 0.99},
        {"temperature": 1.0, "top_k": 600, "top_p": 0.95},
    ]
    return [draw(i, i % 3, seed=i % 5, **kinds[i % len(kinds)]) for i in range(48)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    logits, draws = random_logits(48, seed=5).to(dtype), mixed_draws()
    together = sample(logits, draws)
    alone = [sample(logits[i : i + 1], [draws[i]])[0] for i in range(48)]
    order = list(range(47, -1, -1))
    backwards = sample(logits[order], [draws[i] for i in order])
    assert together == alone == backwards[::-1]


def test_seed_choice_and_position_each_change_the_numbers() -> None:
    numbers = {
        uniform(seed, choice, position)
        for seed in range(-5, 5)
        for choice in range(5)
        for position in range(20)
    }
    assert len(numbers) == 1000
    assert all(0 <= number < 1 for number in numbers)
    assert uniform(7, 0, 3) == uniform(7, 0, 3)
    mean = sum(numbers) / len(numbers)
    assert abs(mean - 0.5) < 0.05


def test_the_numbers_of_a_seed_never_change_between_versions() -> None:
    assert uniform(0, 0, 0) == 0.13870941014555427
    assert uniform(2**63 - 1, 7, 1000) == 0.36257984717504776
    assert uniform(-3, 1, 2) == 0.9613147257869927


@pytest.mark.parametrize("top_k", [VOCAB_SIZE - 1, VOCAB_SIZE, VOCAB_SIZE + 1, MAX_COUNT, 2**70])
def test_top_k_beyond_the_vocabulary_filters_nothing(top_k: int) -> None:
    logits = random_logits(1)
    plain = [sample(logits, [draw(position, top_p=0.9)]) for position in range(20)]
    assert [sample(logits, [draw(position, top_p=0.9, top_k=top_k)]) for position in range(20)] == plain


@pytest.mark.parametrize(("value", "columns"), [(math.nan, [17]), (math.inf, [17]), (-math.inf, slice(None))])
def test_a_broken_row_fails_alone(value: float, columns: Any) -> None:
    logits = random_logits(6)
    draws = [draw(temperature=0.0), draw(), draw(top_k=5)] * 2
    whole = sample(logits, draws)
    logits[3:, columns] = value
    assert sample(logits, draws) == [*whole[:3], *[FAILED_TOKEN_ID] * 3]
