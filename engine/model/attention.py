"""Paged keys and values, and what a way to compute attention over them has to offer.

A slot is one token's place in the cache: `block_id * block_size + offset`.
"""

from typing import Protocol

import torch
from torch import Tensor

from engine.model.step import ForwardBatch, StepInputs


class KVCache:
    """Keys and values of all layers in blocks.

    `keys[layer]` and `values[layer]` are (num_blocks, block_size, num_kv_heads, head_dim), parts of
    `storage`.
    """

    def __init__(
        self,
        num_layers: int,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate `shape` (num_blocks, block_size, num_kv_heads, head_dim) for every layer."""
        # Not zeroed: no slot is read before it was written, and so pages are taken only when used.
        self.storage = torch.empty(
            (num_layers, 2, *shape), dtype=dtype, device=device
        )  # (layers, 2, num_blocks, block_size, kv_heads, head_dim)
        self.keys = [self.storage[layer, 0] for layer in range(num_layers)]
        self.values = [self.storage[layer, 1] for layer in range(num_layers)]


class AttentionBackend(Protocol):
    """A way to compute attention. The new keys and values of the step are in the cache already."""

    name: str
    is_capturable: bool
    """Whether `attend` depends on the tensors of a batch alone, so that a CUDA graph may replay it."""

    def plan(self, inputs: StepInputs, batch: ForwardBatch) -> object:
        """Return what all layers of a step need beside the batch; it becomes `batch.plan`.

        Called once a step, outside of any CUDA graph.
        """
        ...

    def attend(
        self,
        query: Tensor,
        new: tuple[Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
        batch: ForwardBatch,
    ) -> Tensor:
        """Return (tokens, heads * head_dim) for query (tokens, heads, head_dim).

        `new`: keys and values (tokens, kv_heads, head_dim) of the step; `cache`: those of this layer,
        (blocks, block_size, kv_heads, head_dim). Nothing that a sequence has not written is read: 0 * NaN is
        NaN.
        """
        ...
