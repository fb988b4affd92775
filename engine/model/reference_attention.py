"""Attention over paged keys and values in plain torch: correct on any device, the oracle for kernels.

Sequences that compute one token are batched: their keys are gathered by slot into a padded tensor, one call
of scaled dot product attention per group. Longer chunks run one by one with a causal mask over their context.

Padding points at the sequence's own first slot and is masked, so that a slot which was never written is
never read: 0 * NaN is NaN, and a mask alone would not help.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from engine.model.step import ForwardBatch, StepInputs

# Gathered keys of a group stay in the processor's cache while they are used, and in memory that the allocator
# keeps: measured on two Zen 4 cores, 0.5 to 1 MiB is quickest (3 MiB: four times slower in bfloat16, through
# page faults). A GPU wants few, large calls instead.
_CPU_GROUP_BYTES = 1 << 20
_CUDA_GROUP_BYTES = 256 << 20


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
class ReferencePlan:
    """Who attends to what in one step."""

    decode_groups: list[DecodeGroup] = field(default_factory=list)
    prefill_chunks: list[PrefillChunk] = field(default_factory=list)


class ReferenceAttention:
    """The `AttentionBackend` that works everywhere."""

    name = "reference"
    is_capturable = False

    def __init__(self, device: torch.device, dtype: torch.dtype, bytes_per_token: int) -> None:
        """Serve a cache of `dtype`, in which a token's keys take `bytes_per_token` in one layer."""
        self._device = device
        self._dtype = attention_dtype(dtype, device)
        limit = _CPU_GROUP_BYTES if device.type == "cpu" else _CUDA_GROUP_BYTES
        self.max_group_tokens = limit // bytes_per_token
        """Most context tokens, padding included, that one group of sequences gathers."""

    def plan(self, inputs: StepInputs, _batch: ForwardBatch) -> ReferencePlan:
        """Return groups and masks."""
        tables = torch.from_numpy(inputs.block_tables).long()  # (sequences, blocks) int64
        starts, contexts = inputs.query_starts.tolist(), inputs.context_lens.tolist()
        block_size = inputs.block_size
        return ReferencePlan(
            self._make_groups(contexts[: inputs.num_decodes], tables, block_size),
            [
                self._make_chunk((starts[i], starts[i + 1]), contexts[i], tables[i], block_size)
                for i in range(inputs.num_decodes, inputs.num_sequences)
            ],
        )

    def _make_groups(self, contexts: list[int], tables: Tensor, block_size: int) -> list[DecodeGroup]:
        """Cut the single-token rows, which are sorted by context, into groups of bounded size."""
        groups = []
        start = 0
        for row in range(1, len(contexts) + 1):
            # `row` would make the group as long as its own context, since contexts grow with the rows.
            if row == len(contexts) or (row + 1 - start) * contexts[row] > self.max_group_tokens:
                length = contexts[row - 1]
                slots = _slots(tables[start:row], length, block_size)  # (sequences, length) int64
                groups.append(self._make_group(contexts[start:row], slots, start))
                start = row
        return groups

    def _make_group(self, contexts: list[int], slots: Tensor, start: int) -> DecodeGroup:
        last = torch.tensor(contexts)[:, None] - 1  # (sequences, 1) int64
        is_padding = torch.arange(slots.shape[1]) > last  # (sequences, length) bool
        slots = torch.where(is_padding, slots[:, :1], slots)  # (sequences, length) int64
        mask = torch.zeros(is_padding.shape, dtype=self._dtype).masked_fill_(is_padding, -torch.inf)
        return DecodeGroup(
            start,
            start + len(contexts),
            context_slots=slots.flatten().to(self._device),  # (sequences * length) int64
            mask=mask[:, None, None].to(self._device),  # (sequences, 1, 1, length)
        )

    def _make_chunk(
        self, rows: tuple[int, int], context: int, table: Tensor, block_size: int
    ) -> PrefillChunk:
        count = rows[1] - rows[0]
        if context == count:
            return PrefillChunk(*rows)
        visible = torch.ones((count, context), dtype=torch.bool).tril_(context - count)  # (tokens, length)
        mask = torch.zeros(visible.shape, dtype=self._dtype).masked_fill_(~visible, -torch.inf)
        return PrefillChunk(
            *rows,
            context_slots=_slots(table, context, block_size).to(self._device),  # (length) int64
            mask=mask.to(self._device),  # (tokens, length)
        )

    def attend(
        self,
        query: Tensor,
        new: tuple[Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
        batch: ForwardBatch,
    ) -> Tensor:
        """Return (tokens, heads * head_dim) for query (tokens, heads, head_dim)."""
        plan = batch.plan
        assert isinstance(plan, ReferencePlan)
        slots = (flatten_slots(cache[0]), flatten_slots(cache[1]))  # 2 * (slots, kv_size)
        output = torch.empty_like(query)  # (tokens, heads, head_dim)
        wide = query.to(self._dtype)  # (tokens, heads, head_dim)
        for group in plan.decode_groups:
            output[group.start : group.end] = _attend_decode(wide[group.start : group.end], slots, group)
        for chunk in plan.prefill_chunks:
            rows = slice(chunk.start, chunk.end)
            context = (new[0][rows], new[1][rows])  # 2 * (length, kv_heads, head_dim)
            if chunk.context_slots is not None:
                context = _gather(*slots, chunk.context_slots, new[0].shape[1:])
            output[rows] = _attend_chunk(wide[rows], context, chunk.mask)
        return output.flatten(1)  # (tokens, heads * head_dim)


def attention_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the type in which attention is computed (and masks are made) for a cache of `dtype`.

    On the CPU always float32: attention of single tokens in bfloat16 takes three times as long there
    (measured on two Zen 4 cores, torch 2.13, conversion included), and is less exact.
    """
    return torch.float32 if device.type == "cpu" else dtype


def flatten_slots(cache: Tensor) -> Tensor:
    """Return a layer's keys or values as rows of slots: (slots, kv_heads * head_dim)."""
    return cache.view(-1, cache.shape[-2] * cache.shape[-1])


def _slots(tables: Tensor, length: int, block_size: int) -> Tensor:
    """Return the slots of positions [0, length) for block tables (..., blocks): (..., length) int64."""
    num_blocks = -(-length // block_size)
    offsets = torch.arange(block_size)  # (block_size) int64
    slots = tables[..., :num_blocks, None] * block_size + offsets  # (..., blocks, block_size) int64
    return slots.flatten(-2)[..., :length]


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
