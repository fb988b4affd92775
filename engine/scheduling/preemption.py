"""Which running sequence gives its blocks up when there are too few, and what becomes of them."""

from collections.abc import Callable, Iterable
from typing import Protocol

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.sequence import Sequence


class PreemptionPolicy(Protocol):
    """Scores candidates; the lowest score is the victim, ties go to the newest arrival."""

    name: str

    def score(self, sequence: Sequence) -> float:
        """Return the score of one candidate; pure."""
        ...


class NewestFirst:
    """The latest arrival gives way: the oldest always advances."""

    name = "newest-first"

    def score(self, sequence: Sequence) -> float:
        """Later arrivals score lower."""
        return -sequence.seq_id


class OldestFirst:
    """The earliest arrival gives way: it has had its turn, and a prompt's first token is not kept waiting."""

    name = "oldest-first"

    def score(self, sequence: Sequence) -> float:
        """Earlier arrivals score lower."""
        return sequence.seq_id


class SmallestResidual:
    """Who has the fewest tokens left to generate gives way: it will come back for a short time only."""

    name = "smallest-residual"

    def score(self, sequence: Sequence) -> float:
        """Return how many tokens it may still generate."""
        return sequence.max_tokens - sequence.num_output_tokens


class LowestTemperature:
    """The least random sequence gives way: computing it again gives the same tokens for sure."""

    name = "lowest-temperature"

    def score(self, sequence: Sequence) -> float:
        """Return the sampling temperature."""
        return sequence.sampling_params.temperature


class LeastComputedFirst:
    """Who has the fewest computed tokens gives way: the least work is done again."""

    name = "least-computed-first"

    def score(self, sequence: Sequence) -> float:
        """Return how many tokens would be thrown away."""
        return sequence.num_computed_tokens


_POLICIES: dict[str, type[PreemptionPolicy]] = {
    policy.name: policy
    for policy in (NewestFirst, LeastComputedFirst, OldestFirst, SmallestResidual, LowestTemperature)
}
PREEMPTION_POLICIES = tuple(_POLICIES)
"""Names that `make_preemption_policy` knows."""


def make_preemption_policy(name: str) -> PreemptionPolicy:
    """Return the policy called `name`; `ConfigError` lists the known ones."""
    if name not in _POLICIES:
        raise ConfigError(f"preemption is {name!r}; allowed: {', '.join(_POLICIES)}.")
    return _POLICIES[name]()


def choose_victim(
    policy: PreemptionPolicy, candidates: Iterable[Sequence], rank: Callable[[Sequence], int]
) -> tuple[Sequence, list[tuple[int, float]]]:
    """Return the victim, of the lowest `rank`, and every candidate as (seq_id, score)."""
    score = policy.score
    scores = [(rank(item), score(item), -item.seq_id, item) for item in candidates]
    return min(scores)[3], [(-newness, points) for _, points, newness, _ in scores]


def reckon_costs(config: EngineConfig, num_tokens: int, num_blocks: int) -> tuple[float, float]:
    """Return what recomputing tokens takes, and copying blocks to the host tier and back, in ns.

    Both come from speeds that were measured when the engine started (0: not measured).
    """
    return config.recompute_ns_per_token * num_tokens, 2 * config.swap_ns_per_block * num_blocks


def is_swap_better(config: EngineConfig, mode: str, costs: tuple[float, float]) -> bool:
    """Whether a victim's blocks shall go to the host tier under preemption mode `mode`."""
    if config.num_host_blocks == 0 or mode == "recompute":
        return False
    return mode == "swap" or costs[1] < costs[0] or costs == (0, 0)
