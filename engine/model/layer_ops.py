"""What a decoder layer does beside its products and its attention, behind one interface.

Plain torch does it everywhere; a GPU has kernels of its own that do each in one pass over memory.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.model.layers import RotaryTable, apply_rotary, rms_norm
from engine.model.reference_attention import flatten_slots
from engine.model.step import ForwardBatch


@dataclass(frozen=True, slots=True)
class HeadShape:
    """How a row of stacked queries, keys and values is cut; `eps` is that of the head norms."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights (head_dim) of the norms that queries and keys pass before they are rotated (Qwen3)."""

    query: Tensor
    key: Tensor


class LayerOps(Protocol):
    """The arithmetic around products and attention. Norms and rotations are computed in float32."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Scale the last dimension of x to unit root mean square, then by `weight`."""
        ...

    def add_rms_norm(self, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add `delta` to `hidden` (tokens, hidden_size) in place; return the norm of the sum."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return `silu(gate) * up` (tokens, n) for both side by side (tokens, 2 * n)."""
        ...

    def rotate_and_store(
        self,
        qkv: Tensor,
        shape: HeadShape,
        norms: HeadNorms | None,
        rotary: RotaryTable,
        cache: tuple[Tensor, Tensor],
        batch: ForwardBatch,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Norm and rotate queries and keys, write keys and values to the step's slots.

        qkv (tokens, (heads + 2 * kv_heads) * head_dim); `cache`: keys and values of the layer. A row whose
        slot is negative is padding and written nowhere. Returns query (tokens, heads, head_dim), key and
        value (tokens, kv_heads, head_dim); qkv may be overwritten, and they may be views of it.
        """
        ...


class TorchOps:
    """`LayerOps` in plain torch: correct on any device, the oracle for kernels."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Scale the last dimension of x to unit root mean square, then by `weight`."""
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add `delta` to `hidden` (tokens, hidden_size) in place; return the norm of the sum."""
        hidden += delta
        return rms_norm(hidden, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return `silu(gate) * up` (tokens, n) for both side by side (tokens, 2 * n)."""
        gate, up = gate_up.chunk(2, dim=-1)  # 2 * (tokens, n)
        return functional.silu(gate).mul_(up)  # (tokens, n)

    def rotate_and_store(
        self,
        qkv: Tensor,
        shape: HeadShape,
        norms: HeadNorms | None,
        rotary: RotaryTable,
        cache: tuple[Tensor, Tensor],
        batch: ForwardBatch,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Norm and rotate queries and keys, write keys and values to the step's slots."""
        num_heads, num_kv_heads = shape.num_heads, shape.num_kv_heads
        rows = qkv.view(-1, num_heads + 2 * num_kv_heads, shape.head_dim)
        query_key = rows[:, : num_heads + num_kv_heads]  # (tokens, heads + kv_heads, head_dim)
        value = rows[:, num_heads + num_kv_heads :]  # (tokens, kv_heads, head_dim)
        if norms is not None:
            query = rms_norm(query_key[:, :num_heads], norms.query, shape.eps)
            key = rms_norm(query_key[:, num_heads:], norms.key, shape.eps)
            query_key = torch.cat((query, key), 1)  # (tokens, heads + kv_heads, head_dim)
        if batch.angles is None:  # once for all layers
            batch.angles = rotary.at(batch.positions)  # 2 * (tokens, 1, head_dim) float32
        query_key = apply_rotary(query_key, *batch.angles)  # (tokens, heads + kv_heads, head_dim)
        query, key = query_key[:, :num_heads], query_key[:, num_heads:]
        slots = batch.slot_mapping.long()  # (tokens) int64
        kept = slots >= 0 if batch.has_padding else slice(None)  # (tokens) bool, or all
        for part, new in zip(cache, (key, value), strict=True):
            flatten_slots(part).index_copy_(0, slots[kept], new.flatten(1)[kept])
        return query, key, value
