"""Requests that wait, in the order in which they are considered."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from engine.errors import ConfigError
from engine.sequence import Sequence


def _arrival(sequence: Sequence) -> int:
    return sequence.seq_id


class WaitingQueue:
    """First come, first served. A preempted sequence goes back to the place its arrival gives it."""

    def __init__(self) -> None:
        """Start empty."""
        self._sequences: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Insert by arrival."""
        insort(self._sequences, sequence, key=_arrival)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out; it must be in."""
        index = bisect_left(self._sequences, _arrival(sequence), key=_arrival)
        if self._sequences[index] is not sequence:
            raise KeyError(sequence.seq_id)
        del self._sequences[index]

    def __len__(self) -> int:
        """Count the waiting sequences."""
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """Go through them in order; the queue may change meanwhile."""
        return iter(self._sequences.copy())


_QUEUES = {"fcfs": WaitingQueue}
QUEUE_POLICIES = tuple(_QUEUES)
"""Names that `make_waiting_queue` knows."""


def make_waiting_queue(policy: str) -> WaitingQueue:
    """Return an empty queue with the order called `policy`; `ConfigError` lists the known ones."""
    if policy not in _QUEUES:
        raise ConfigError(f"policy is {policy!r}; allowed: {', '.join(_QUEUES)}.")
    return _QUEUES[policy]()
