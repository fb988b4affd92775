"""Attention over paged keys and values, in plain torch: correct on any device, the oracle for kernels.

A slot is one token's place in the cache: `block_id * block_size + offset`. Sequences that compute one
token are batched: their keys are gathered by slot into a padded tensor, one call of scaled dot product
attention per group. Longer chunks run one by one with a causal mask over their context.

Padding points at the sequence's own first slot and is masked, so that a slot which was never written is
never read: 0 * NaN is NaN, and a mask alone would not help.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(slots=True)
class DecodeGroup:
    """Sequences of similar context that compute one token each: rows [start, end) of the batch.

    `context_slots` (sequences * length) are the slots of their contexts, padded to the longest;
    `mask` (sequences, 1, 1, length) is 0 where a slot counts and -inf where it pads.
    """

    start: int
    end: int
    context_slots: Tensor
    mask: Tensor


@dataclass(slots=True)
class PrefillChunk:
    """Several tokens of one sequence: rows [start, end) of the batch.

    `context_slots` (length) are the slots of all tokens up to the chunk's last, `mask` (tokens, length)
    is -inf above the diagonal. Both are None when the chunk begins the sequence.
    """

    start: int
    end: int
    context_slots: Tensor | None = None
    mask: Tensor | None = None


@dataclass(slots=True)
class AttentionBatch:
    """Who attends to what in one step. `slot_mapping` (tokens): where each new token's KV goes."""

    slot_mapping: Tensor
    decode_groups: list[DecodeGroup] = field(default_factory=list)
    prefill_chunks: list[PrefillChunk] = field(default_factory=list)


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


def attention_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the type in which attention is computed (and masks are made) for a cache of `dtype`.

    On the CPU always float32: attention of single tokens in bfloat16 takes three times as long there
    (measured on two Zen 4 cores, torch 2.13, conversion included), and is less exact.
    """
    return torch.float32 if device.type == "cpu" else dtype


def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: tuple[Tensor, Tensor],
    batch: AttentionBatch,
) -> Tensor:
    """Write the new keys and values to their slots, then attend.

    query (tokens, heads, head_dim); key, value (tokens, kv_heads, head_dim); `cache`: keys and values
    of this layer. Returns (tokens, heads * head_dim).
    """
    slots = tuple(part.view(-1, part.shape[-2] * part.shape[-1]) for part in cache)  # 2 * (slots, kv_size)
    slots[0].index_copy_(0, batch.slot_mapping, key.flatten(1))
    slots[1].index_copy_(0, batch.slot_mapping, value.flatten(1))
    output = torch.empty_like(query)  # (tokens, heads, head_dim)
    wide = query.to(attention_dtype(query.dtype, query.device))  # (tokens, heads, head_dim)
    for group in batch.decode_groups:
        output[group.start : group.end] = _attend_decode(
            wide[group.start : group.end], (slots[0], slots[1]), group
        )
    for chunk in batch.prefill_chunks:
        rows = slice(chunk.start, chunk.end)
        context = (key[rows], value[rows])  # 2 * (length, kv_heads, head_dim)
        if chunk.context_slots is not None:
            context = _gather(slots[0], slots[1], chunk.context_slots, key.shape[1:])
        output[rows] = _attend_chunk(wide[rows], context, chunk.mask)
    return output.flatten(1)  # (tokens, heads * head_dim)


def _gather(keys: Tensor, values: Tensor, slots: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    # index_select copies whole rows; indexing with [] takes five times as long on the CPU.
    return (
        keys.index_select(0, slots).view(-1, *shape),  # (slots, kv_heads, head_dim)
        values.index_select(0, slots).view(-1, *shape),  # (slots, kv_heads, head_dim)
    )


def _attend_decode(query: Tensor, slots: tuple[Tensor, Tensor], group: DecodeGroup) -> Tensor:
    num_seqs, _, head_dim = query.shape
    shape = (num_seqs, group.mask.shape[-1], -1, head_dim)  # (seqs, length, kv_heads, head_dim)
    key = slots[0].index_select(0, group.context_slots).view(shape).to(query.dtype)
    value = slots[1].index_select(0, group.context_slots).view(shape).to(query.dtype)
    attended = functional.scaled_dot_product_attention(
        query.unsqueeze(2),  # (seqs, heads, 1, head_dim)
        key.transpose(1, 2),  # (seqs, kv_heads, length, head_dim)
        value.transpose(1, 2),  # (seqs, kv_heads, length, head_dim)
        attn_mask=group.mask,
        enable_gqa=True,
    )  # (seqs, heads, 1, head_dim)
    return attended.squeeze(2)  # (seqs, heads, head_dim)


def _attend_chunk(query: Tensor, context: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
    key, value = (part.to(query.dtype) for part in context)  # 2 * (length, kv_heads, head_dim)
    attended = functional.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),  # (1, heads, tokens, head_dim)
        key.transpose(0, 1).unsqueeze(0),  # (1, kv_heads, length, head_dim)
        value.transpose(0, 1).unsqueeze(0),  # (1, kv_heads, length, head_dim)
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=True,
    )  # (1, heads, tokens, head_dim)
    return attended.squeeze(0).transpose(0, 1)  # (tokens, heads, head_dim)
