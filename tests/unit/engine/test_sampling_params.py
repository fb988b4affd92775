"""Sampling parameters: every field has both bounds, and the error names it."""

from typing import Any

import pytest

from engine.errors import RequestError
from engine.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("temperature", -0.1),
        ("temperature", 2.01),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("max_tokens", 2**31),
        ("top_k", -1),
        ("top_k", 2**31),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("stop", ("",)),
        ("stop", ("x" * 257,)),
        ("stop", ("x",) * 17),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (100,)),
        ("stop_token_ids", (1,) * 65),
    ],
)
def test_out_of_range_values_name_the_field(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: value}).validate(vocab_size=100)
    assert (caught.value.param, caught.value.code) == (field, "invalid_value")


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(max_tokens=1, temperature=0, top_p=1e-9, top_k=2**31 - 1, seed=-(2**63)),
        SamplingParams(temperature=2, stop=("x" * 256,) * 16, stop_token_ids=(0, 99), seed=2**63 - 1),
    ],
)
def test_values_at_the_edge_are_fine(params: SamplingParams) -> None:
    params.validate(vocab_size=100)


@pytest.mark.parametrize(
    ("temperature", "top_k", "greedy"),
    [(0, 0, True), (1e-7, 0, True), (1e-3, 0, True), (0.01, 0, False), (1, 1, True)],
)
def test_tiny_temperatures_are_greedy(temperature: float, top_k: int, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature, top_k=top_k).is_greedy is greedy
