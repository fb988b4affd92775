"""Rotary angles: the numbers of the formula, scaled as configured."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.model.config import ModelConfig, RopeScaling, config_from_hf
from engine.model.layers import RotaryTable
from engine.model.rotary import inverse_frequencies, rotary_table

CONFIG = config_from_hf(
    {
        "model_type": "llama", "num_attention_heads": 2, "hidden_size": 128, "vocab_size": 100,
        "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
    },
    {},
)  # fmt: skip
LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 256)


def exact_frequency(index: int, scaling: RopeScaling) -> float:
    inverse = CONFIG.rope_theta ** (-2 * index / CONFIG.head_dim)
    if scaling.kind == "linear":
        return float(inverse / scaling.factor)
    if scaling.kind == "llama3":
        turns = scaling.original_max_position * inverse / (2 * math.pi)
        span = scaling.high_freq_factor - scaling.low_freq_factor
        share = min(max((turns - scaling.low_freq_factor) / span, 0.0), 1.0)
        return float((1 - share) * inverse / scaling.factor + share * inverse)
    return float(inverse)


@pytest.mark.parametrize("scaling", [RopeScaling(), RopeScaling("linear", 4.0), LLAMA3], ids=lambda s: s.kind)
def test_frequencies_are_those_of_the_formula(scaling: RopeScaling) -> None:
    config = replace(CONFIG, rope_scaling=scaling)
    exact = [exact_frequency(index, scaling) for index in range(config.head_dim // 2)]
    np.testing.assert_allclose(inverse_frequencies(config), exact, rtol=3e-7)


@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, rope_scaling=LLAMA3)])
@pytest.mark.parametrize("has_factors", [False, True])
def test_torch_and_numpy_have_the_same_table(config: ModelConfig, *, has_factors: bool) -> None:
    half = config.head_dim // 2
    factors = np.linspace(1, 8, half, dtype=np.float32) if has_factors else None
    cosines, sines = rotary_table(config, 100, factors)
    assert cosines.shape == sines.shape == (100, half)
    assert cosines.dtype == sines.dtype == np.float32
    table = RotaryTable(
        config, 100, torch.device("cpu"), None if factors is None else torch.from_numpy(factors)
    )
    cos, sin = (part.squeeze(1).numpy() for part in table.at(torch.arange(100)))
    np.testing.assert_array_equal(cos, np.concatenate([cosines, cosines], 1))
    np.testing.assert_array_equal(sin, np.concatenate([-sines, sines], 1))
    divided = inverse_frequencies(config) / (1 if factors is None else factors)
    np.testing.assert_allclose(cosines[99], np.cos(99 * divided.astype(np.float64)), atol=1e-5)
