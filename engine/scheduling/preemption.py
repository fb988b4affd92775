"""Which running sequence gives its blocks up when there are too few."""

from collections.abc import Sequence as Seq
from typing import Protocol

from engine.errors import ConfigError
from engine.sequence import Sequence


class PreemptionPolicy(Protocol):
    """Scores candidates; the lowest score is the victim, ties go to the newest arrival."""

    name: str

    def score(self, sequence: Sequence) -> float:
        """Return the score of one candidate; pure."""
        ...


class NewestFirst:
    """The latest arrival gives way: the oldest always advances, so all work ends."""

    name = "newest-first"

    def score(self, sequence: Sequence) -> float:
        """Later arrivals score lower."""
        return -sequence.seq_id


_POLICIES: dict[str, type[PreemptionPolicy]] = {NewestFirst.name: NewestFirst}
PREEMPTION_POLICIES = tuple(_POLICIES)
"""Names that `make_preemption_policy` knows."""


def make_preemption_policy(name: str) -> PreemptionPolicy:
    """Return the policy called `name`; `ConfigError` lists the known ones."""
    if name not in _POLICIES:
        raise ConfigError(f"preemption is {name!r}; allowed: {', '.join(_POLICIES)}.")
    return _POLICIES[name]()


def choose_victim(
    policy: PreemptionPolicy, candidates: Seq[Sequence]
) -> tuple[Sequence, list[tuple[int, float]]]:
    """Return the victim and every candidate as (seq_id, score)."""
    scores = [(policy.score(sequence), -sequence.seq_id, sequence) for sequence in candidates]
    victim = min(scores, key=lambda entry: entry[:2])[2]
    return victim, [(sequence.seq_id, score) for score, _, sequence in scores]
