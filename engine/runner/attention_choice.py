"""Chooses how torch computes attention, by what device, model and installed packages allow. No torch here."""

from dataclasses import dataclass

from engine.errors import ConfigError

AUTO, TRITON, VARLEN, REFERENCE = "auto", "triton", "varlen", "reference"
ATTENTIONS = (AUTO, TRITON, VARLEN, REFERENCE)

OLDEST_TRITON = (3, 6)
"""The kernels were not tried with older ones."""

OLDEST_VARLEN_TORCH = (2, 13)
"""Before, only FlashAttention 3, a package of its own, took block tables and `num_splits`."""

VARLEN_PAGE_TOKENS = 256
"""FlashAttention 2 takes pages of a multiple of 256 tokens ("Paged KV cache block size must be divisible by
256", flash_api.cpp); a block has at most as many."""

_VARLEN_DTYPES = ("bf16", "fp16")
_VARLEN_HEAD_DIM_STEP = 8
_MAX_VARLEN_HEAD_DIM = 256
_VARLEN_CAPABILITY = (8, 0)
"""FlashAttention 2 is for Ampere and newer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionFacts:
    """What the choice depends on.

    `device` is "cpu" or "cuda", `capability` that of the GPU; `dtype`, `head_dim` and `block_size` are those
    of model and cache. `triton_version` and `torch_version` are as installed, such as (3, 6); None: there is
    no Triton. `triton_refusal`: why the Triton kernels do not take the model. `is_interpreted`: whether
    Triton kernels run in its interpreter. `has_block_tables`: whether torch's `varlen_attn` takes any.
    """

    device: str
    capability: tuple[int, int]
    dtype: str
    head_dim: int
    block_size: int
    triton_version: tuple[int, int] | None
    triton_refusal: str | None
    is_interpreted: bool
    torch_version: tuple[int, int]
    has_block_tables: bool


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The attention that will be used, and a sentence about it where it is not the expected one."""

    name: str
    note: str | None = None


def choose_attention(asked: str, facts: AttentionFacts) -> AttentionChoice:
    """Return the attention; raises `ConfigError` where the one that was asked for cannot be had."""
    obstacles = {TRITON: find_triton_obstacle(facts), VARLEN: find_varlen_obstacle(facts), REFERENCE: None}
    if asked != AUTO:
        if obstacles[asked] is not None:
            others = [name for name in (TRITON, VARLEN, REFERENCE) if obstacles[name] is None]
            raise ConfigError(
                f"attention is {asked}, but {obstacles[asked]}; use {' or '.join([AUTO, *others])}."
            )
        if asked == TRITON and facts.is_interpreted:
            return AttentionChoice(
                TRITON, "Triton's interpreter computes, which is for tests only: very slow."
            )
        return AttentionChoice(asked)
    if facts.device == "cpu":
        return AttentionChoice(REFERENCE)
    if obstacles[TRITON] is None:
        return AttentionChoice(TRITON)
    if obstacles[VARLEN] is None:
        return AttentionChoice(VARLEN, f"Attention is torch's varlen_attn: {obstacles[TRITON]}.")
    return AttentionChoice(
        REFERENCE,
        f"Attention is computed in plain torch, which is much slower: {obstacles[TRITON]}; and "
        f"{obstacles[VARLEN]}.",
    )


def find_triton_obstacle(facts: AttentionFacts) -> str | None:
    """Return why the Triton kernels cannot be used, as a part of a sentence."""
    if facts.triton_version is None:
        return "Triton is not installed (pip install triton)"
    if facts.triton_version < OLDEST_TRITON:
        return (
            f"Triton {_show(facts.triton_version)} is too old (pip install 'triton>={_show(OLDEST_TRITON)}')"
        )
    if facts.device == "cpu" and not facts.is_interpreted:
        return "its kernels need a GPU"
    return facts.triton_refusal


def find_varlen_obstacle(facts: AttentionFacts) -> str | None:
    """Return why torch's `varlen_attn` cannot be used, as a part of a sentence."""
    if facts.device == "cpu":
        return "varlen_attn needs a GPU"
    if facts.torch_version < OLDEST_VARLEN_TORCH or not facts.has_block_tables:
        return (
            f"torch {_show(facts.torch_version)} has no varlen_attn for paged keys and values "
            f"({_show(OLDEST_VARLEN_TORCH)} has)"
        )
    if facts.capability < _VARLEN_CAPABILITY:
        least, there = _show(_VARLEN_CAPABILITY), _show(facts.capability)
        return f"varlen_attn needs a GPU of compute capability {least} or more, this one has {there}"
    if facts.dtype not in _VARLEN_DTYPES:
        return f"varlen_attn is for {' and '.join(_VARLEN_DTYPES)}, not {facts.dtype}"
    if facts.head_dim > _MAX_VARLEN_HEAD_DIM or facts.head_dim % _VARLEN_HEAD_DIM_STEP:
        return (
            f"varlen_attn is for heads of up to {_MAX_VARLEN_HEAD_DIM} numbers, a multiple of "
            f"{_VARLEN_HEAD_DIM_STEP}, and the model's have {facts.head_dim}"
        )
    if facts.block_size % VARLEN_PAGE_TOKENS:
        return f"varlen_attn needs a block_size of {VARLEN_PAGE_TOKENS}, which is {facts.block_size}"
    return None


def _show(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
