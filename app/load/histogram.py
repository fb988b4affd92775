"""Many times in little memory: how often each came, to one percent."""

import math
from collections import Counter

_STEP = math.log(1.01)
_SMALLEST_S = 1e-7
"""Shorter times count as this one."""


class Histogram:
    """Counts times in seconds; percentiles are right to one percent, however many there are."""

    def __init__(self) -> None:
        """Start empty."""
        self._counts: Counter[int] = Counter()
        self.total = 0

    def add(self, time_s: float) -> None:
        """Count one time."""
        self._counts[round(math.log(max(time_s, _SMALLEST_S)) / _STEP)] += 1
        self.total += 1

    def percentile(self, percent: float) -> float | None:
        """Return the nearest-rank percentile, None without values."""
        rank = max(1, math.ceil(self.total * percent / 100))
        for bucket in sorted(self._counts):
            rank -= self._counts[bucket]
            if rank <= 0:
                return math.exp(bucket * _STEP)
        return None
