"""The numbers that draws are made from: a counter-based hash, the same for every runner."""

_MASK_64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_RANDOM_BITS = 53  # as many as a float64 holds


def uniform(seed: int, choice_index: int, position: int) -> float:
    """Return a number in [0, 1) that is fixed by its arguments (SplitMix64's finaliser, chained)."""
    state = _mix(seed & _MASK_64)
    state = _mix(state ^ choice_index)
    state = _mix(state ^ position)
    return (state >> (64 - _RANDOM_BITS)) / (1 << _RANDOM_BITS)


def _mix(value: int) -> int:
    value = (value + _GOLDEN) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)
