"""Which attention torch computes: by device, model and packages, and what is said where it is another one."""

from dataclasses import replace
from typing import Any

import pytest

from engine.errors import ConfigError
from engine.runner.attention_choice import AttentionFacts, choose_attention

HOPPER = AttentionFacts(
    device="cuda",
    capability=(9, 0),
    dtype="bf16",
    head_dim=64,
    block_size=16,
    triton_version=(3, 6),
    triton_refusal=None,
    is_interpreted=False,
    torch_version=(2, 13),
    has_block_tables=True,
)
CPU = replace(HOPPER, device="cpu", capability=(0, 0), dtype="fp32")
NO_TRITON: dict[str, Any] = {"triton_version": None}


@pytest.mark.parametrize(
    ("changes", "name", "said"),
    [
        ({}, "triton", None),
        ({"block_size": 256, "torch_version": (2, 11), "has_block_tables": False}, "triton", None),
        (
            NO_TRITON | {"block_size": 256},
            "varlen",
            r"varlen_attn: Triton is not installed \(pip install triton\)",
        ),
        (NO_TRITON, "reference", "much slower: Triton is not .*block_size of 256, which is 16"),
        (
            NO_TRITON | {"block_size": 256, "torch_version": (2, 11), "has_block_tables": False},
            "reference",
            r"torch 2\.11 has no varlen_attn for paged keys and values \(2\.13 has\)",
        ),
        # The signature of 2.12 has block tables, but only FlashAttention 3 took them.
        (NO_TRITON | {"block_size": 256, "torch_version": (2, 12)}, "reference", r"torch 2\.12 has no"),
        (NO_TRITON | {"block_size": 256, "dtype": "fp32"}, "reference", "for bf16 and fp16, not fp32"),
        (NO_TRITON | {"block_size": 256, "head_dim": 320}, "reference", "and the model's have 320"),
        (NO_TRITON | {"block_size": 256, "head_dim": 84}, "reference", "and the model's have 84"),
        ({"triton_version": (3, 5), "block_size": 256}, "varlen", r"Triton 3\.5 is too old .*triton>=3\.6"),
        (
            {"triton_refusal": "heads of 512 are too large"},
            "reference",
            "slower: heads of 512 are too large; and",
        ),
        (
            NO_TRITON | {"capability": (7, 5), "block_size": 256},
            "reference",
            r"capability 8\.0 or more, this one has 7\.5",
        ),
    ],
)
def test_the_best_that_can_be_had_is_taken_on_a_gpu(
    changes: dict[str, Any], name: str, said: str | None
) -> None:
    choice = choose_attention("auto", replace(HOPPER, **changes))
    assert choice.name == name
    if said is None:
        assert choice.note is None
    else:
        with pytest.raises(ValueError, match=said):
            raise ValueError(choice.note)
        assert "\n" not in (choice.note or "")


@pytest.mark.parametrize(
    ("asked", "facts"),
    [
        ("triton", HOPPER),
        ("varlen", replace(HOPPER, block_size=256)),
        ("reference", HOPPER),
        ("reference", CPU),
        ("auto", CPU),
    ],
)
def test_what_is_asked_for_and_can_be_had_is_taken_without_a_word(asked: str, facts: AttentionFacts) -> None:
    choice = choose_attention(asked, facts)
    assert choice.name == (asked if asked != "auto" else "reference")
    assert choice.note is None


@pytest.mark.parametrize(
    ("asked", "facts", "message"),
    [
        (
            "varlen",
            HOPPER,
            "varlen_attn needs a block_size of 256, which is 16; use auto or triton or reference",
        ),
        ("varlen", CPU, "attention is varlen, but varlen_attn needs a GPU; use auto or reference"),
        ("triton", CPU, "attention is triton, but its kernels need a GPU; use auto or reference"),
        ("triton", replace(HOPPER, **NO_TRITON), "attention is triton, but Triton is not installed"),
        (
            "triton",
            replace(HOPPER, triton_refusal="heads of 512 are too large", block_size=256),
            "attention is triton, but heads of 512 are too large; use auto or varlen or reference",
        ),
    ],
)
def test_what_is_asked_for_and_cannot_be_had_is_refused(
    asked: str, facts: AttentionFacts, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_attention(asked, facts)
    assert message in str(caught.value)


def test_the_interpreter_of_triton_is_taken_only_when_asked_for() -> None:
    facts = replace(CPU, is_interpreted=True)
    assert choose_attention("auto", facts).name == "reference"
    choice = choose_attention("triton", facts)
    assert choice.name == "triton"
    assert "for tests only" in (choice.note or "")
