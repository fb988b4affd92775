"""What is compared when attention kernels are checked: a step of one shape, computed and in float64."""

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from bench.device import float64
from engine.model.attention import AttentionBackend
from engine.model.layer_ops import LayerOps
from tests.support.attention_reference import AttentionShape, make_case

TOLERANCES = {"float32": 5e-5, "float16": 4e-3, "bfloat16": 2e-2}
"""Of the largest number of a row: a few roundings of its type, and for float32 of sums of thousands."""

_CONTEXT_BOUND = 4
"""A captured batch is told the most tokens that a sequence may have, here so many times what these have."""

Spans: TypeAlias = tuple[tuple[int, int], ...]
"""Of each sequence, single tokens first: tokens that are there already, tokens that are computed."""


class Case(Protocol):
    """One comparison."""

    @property
    def dtype(self) -> str:
        """Name of the type that the kernel computes in."""
        ...

    @property
    def name(self) -> str:
        """What is compared, unique in the grid."""
        ...

    def run(self, attention: AttentionBackend, ops: LayerOps, device: torch.device) -> float:
        """Return the largest error, see `float64.largest_error`."""
        ...


@dataclass(frozen=True)
class Heads:
    """Heads of queries, of keys and values, and how wide they are."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        """Name them."""
        return f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}"


@dataclass(frozen=True)
class AttentionCase:
    """Attention over pages, NaN wherever the case's sequences have written nothing.

    `num_padding` sequences behind the others are none, as in a captured batch, about which only its tensors
    say what there is.
    """

    title: str
    dtype: str
    heads: Heads
    spans: Spans
    block_size: int = 16
    num_padding: int = 0

    @property
    def name(self) -> str:
        """What is compared."""
        return f"{self.title}, {self.heads}, {self.dtype}, blocks of {self.block_size}"

    def run(self, attention: AttentionBackend, ops: LayerOps, device: torch.device) -> float:  # noqa: ARG002
        """Return the largest error of any row and head that belongs to a sequence."""
        heads = self.heads
        shape = AttentionShape(
            heads.head_dim, heads.num_heads // heads.num_kv_heads, heads.num_kv_heads, self.block_size
        )
        sequences = [(before + count, count) for before, count in self.spans]
        case = make_case(shape, sequences, getattr(torch, self.dtype), device)
        num_rows = len(case.query)
        expected = case.expected()[:num_rows]  # (rows, heads * head_dim)
        if self.num_padding:
            case = case.with_padding(self.num_padding)
            case.batch.max_context_len *= _CONTEXT_BOUND
        else:
            case.batch.plan = attention.plan(case.inputs, case.batch)
        found = attention.attend(case.query, case.new, case.cache, case.batch)[:num_rows]
        by_head = (num_rows, heads.num_heads, heads.head_dim)
        return float64.largest_error(found.view(by_head), expected.view(by_head))
