"""Rotary angles of all positions, in numpy: one table for every runner, so that they agree to the bit."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine.model.config import ModelConfig, RopeScaling

Floats: TypeAlias = NDArray[np.float32]


def rotary_table(
    config: ModelConfig, num_positions: int, freq_factors: Floats | None = None
) -> tuple[Floats, Floats]:
    """Return cosines and sines (positions, head_dim / 2) of the angles at positions [0, num_positions).

    `freq_factors` (head_dim / 2) divide the frequencies; some files carry them.
    """
    inverse = inverse_frequencies(config)  # (head_dim / 2) float32
    if freq_factors is not None:
        inverse = inverse / freq_factors  # (head_dim / 2) float32
    positions = np.arange(num_positions, dtype=np.float32)  # (positions) float32
    angles = positions[:, None] * inverse  # (positions, head_dim / 2) float32
    return np.cos(angles), np.sin(angles)


def inverse_frequencies(config: ModelConfig) -> Floats:
    """Return the rotary frequencies (head_dim / 2) in radians per position, scaled as configured."""
    exponents = np.arange(0, config.head_dim, 2) / config.head_dim  # (head_dim / 2) float64
    inverse = (1.0 / config.rope_theta**exponents).astype(np.float32)  # (head_dim / 2) float32
    scaling = config.rope_scaling
    if scaling.kind == "linear":
        return inverse / np.float32(scaling.factor)  # (head_dim / 2) float32
    if scaling.kind == "llama3":
        return _scale_llama3(inverse, scaling)  # (head_dim / 2) float32
    return inverse


def _scale_llama3(inverse: Floats, scaling: RopeScaling) -> Floats:
    """Stretch slow rotations by `factor`, keep quick ones, interpolate between (Llama 3.1)."""
    turns = scaling.original_max_position * inverse / (2 * np.pi)  # (head_dim / 2): turns over the context
    span = scaling.high_freq_factor - scaling.low_freq_factor
    share = ((turns - scaling.low_freq_factor) / span).clip(0.0, 1.0)  # (head_dim / 2): 0 slow ... 1 quick
    scaled = (1 - share) * inverse / scaling.factor + share * inverse  # (head_dim / 2)
    return scaled.astype(np.float32)  # (head_dim / 2) float32
