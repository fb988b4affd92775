"""The decision of a step as tensors: which rows, at which positions, in which slots.

Rows are ordered for the attention: first the sequences that compute one token, by length of context,
then the longer chunks. `logits_rows` undoes the order: its entries follow the scheduled sequences.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.attention import AttentionBatch, DecodeGroup, PrefillChunk, attention_dtype
from engine.model.decoder import ForwardBatch
from engine.scheduling.output import ScheduledSequence

# Gathered keys of a group stay in the processor's cache while they are used, and in memory that the allocator
# keeps: measured on two Zen 4 cores, 0.5 to 1 MiB is quickest (3 MiB: four times slower in bfloat16, through
# page faults). A GPU wants few, large calls instead.
_CPU_GROUP_BYTES = 1 << 20
_CUDA_GROUP_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """What the tensors of a batch depend on beside the schedule.

    `bytes_per_token`: size of one token's keys in one layer.
    """

    block_size: int
    bytes_per_token: int
    device: torch.device
    dtype: torch.dtype

    @property
    def mask_dtype(self) -> torch.dtype:
        """The type that attention adds masks in."""
        return attention_dtype(self.dtype, self.device)

    @property
    def max_group_tokens(self) -> int:
        """Most context tokens, padding included, that one group of sequences gathers."""
        limit = _CPU_GROUP_BYTES if self.device.type == "cpu" else _CUDA_GROUP_BYTES
        return limit // self.bytes_per_token


def make_batch(scheduled: list[ScheduledSequence], layout: BatchLayout) -> ForwardBatch:
    """Return the tensors of a step; `scheduled` must not be empty."""
    order = sorted(range(len(scheduled)), key=lambda i: _row_order(scheduled[i]))
    ordered = [scheduled[i] for i in order]
    counts = [entry.num_scheduled_tokens for entry in ordered]
    input_ids, positions, ends = _list_tokens(ordered)
    tables = _pad_tables(ordered, layout.block_size)  # (sequences, blocks) int64
    position_tensor = torch.tensor(positions)  # (tokens) int64
    sequence_of_token = torch.repeat_interleave(torch.tensor(counts))  # (tokens) int64
    blocks = tables[sequence_of_token, position_tensor // layout.block_size]  # (tokens) int64
    slot_mapping = blocks * layout.block_size + position_tensor % layout.block_size  # (tokens) int64
    last_rows = {original: end - 1 for original, end in zip(order, ends, strict=True)}
    wanted = [last_rows[i] for i, entry in enumerate(scheduled) if entry.needs_sampling]
    num_decodes = sum(count == 1 for count in counts)
    return ForwardBatch(
        input_ids=torch.tensor(input_ids).to(layout.device),  # (tokens) int64
        positions=position_tensor.to(layout.device),  # (tokens) int64
        logits_rows=torch.tensor(wanted, dtype=torch.int64).to(layout.device),  # (wanted) int64
        attention=AttentionBatch(
            slot_mapping=slot_mapping.to(layout.device),
            decode_groups=_make_groups(positions[:num_decodes], tables, layout),
            prefill_chunks=[
                _make_chunk(ordered[i], tables[i], ends[i], layout) for i in range(num_decodes, len(ordered))
            ],
        ),
    )


def _row_order(entry: ScheduledSequence) -> tuple[bool, int]:
    return entry.num_scheduled_tokens > 1, entry.num_computed_tokens


def _list_tokens(ordered: list[ScheduledSequence]) -> tuple[list[int], list[int], list[int]]:
    """Return token ids and positions of all rows, and the row after each sequence's last."""
    input_ids: list[int] = []
    positions: list[int] = []
    ends: list[int] = []
    for entry in ordered:
        start, end = entry.num_computed_tokens, entry.num_computed_tokens + entry.num_scheduled_tokens
        input_ids += entry.sequence.token_ids[start:end]
        positions += range(start, end)
        ends.append(len(input_ids))
    return input_ids, positions, ends


def _pad_tables(ordered: list[ScheduledSequence], block_size: int) -> Tensor:
    """Return the block tables as far as the step needs them, padded with each table's first block."""
    needed = [-(-(e.num_computed_tokens + e.num_scheduled_tokens) // block_size) for e in ordered]
    width = max(needed)
    rows = []
    for entry, count in zip(ordered, needed, strict=True):
        table = entry.sequence.block_table[:count]
        assert len(table) == count, f"{entry.sequence} has no block for a token of this step"
        rows.append(table + table[:1] * (width - count))
    return torch.tensor(rows)  # (sequences, blocks) int64


def _make_groups(positions: list[int], tables: Tensor, layout: BatchLayout) -> list[DecodeGroup]:
    """Cut the single-token rows, which are sorted by position, into groups of bounded size."""
    groups = []
    start = 0
    for row in range(1, len(positions) + 1):
        # `row` would make the group as long as its own context, since contexts grow with the rows.
        if row == len(positions) or (row + 1 - start) * (positions[row] + 1) > layout.max_group_tokens:
            groups.append(_make_group(positions, tables, (start, row), layout))
            start = row
    return groups


def _make_group(
    positions: list[int], tables: Tensor, rows: tuple[int, int], layout: BatchLayout
) -> DecodeGroup:
    start, end = rows
    last = torch.tensor(positions[start:end])[:, None]  # (sequences, 1) int64
    length = positions[end - 1] + 1
    slots = _slots(tables[start:end], length, layout.block_size)  # (sequences, length) int64
    is_padding = torch.arange(length) > last  # (sequences, length) bool
    slots = torch.where(is_padding, slots[:, :1], slots)  # (sequences, length) int64
    mask = torch.zeros(is_padding.shape, dtype=layout.mask_dtype).masked_fill_(is_padding, -torch.inf)
    return DecodeGroup(
        start,
        end,
        context_slots=slots.flatten().to(layout.device),  # (sequences * length) int64
        mask=mask[:, None, None].to(layout.device),  # (sequences, 1, 1, length)
    )


def _make_chunk(entry: ScheduledSequence, table: Tensor, end_row: int, layout: BatchLayout) -> PrefillChunk:
    start_row = end_row - entry.num_scheduled_tokens
    computed, count = entry.num_computed_tokens, entry.num_scheduled_tokens
    if computed == 0:
        return PrefillChunk(start_row, end_row)
    length = computed + count
    visible = torch.ones((count, length), dtype=torch.bool).tril_(computed)  # (tokens, length) bool
    mask = torch.zeros(visible.shape, dtype=layout.mask_dtype).masked_fill_(~visible, -torch.inf)
    return PrefillChunk(
        start_row,
        end_row,
        context_slots=_slots(table, length, layout.block_size).to(layout.device),  # (length) int64
        mask=mask.to(layout.device),  # (tokens, length)
    )


def _slots(tables: Tensor, length: int, block_size: int) -> Tensor:
    """Return the slots of positions [0, length) for block tables (..., blocks): (..., length) int64."""
    num_blocks = -(-length // block_size)
    offsets = torch.arange(block_size)  # (block_size) int64
    slots = tables[..., :num_blocks, None] * block_size + offsets  # (..., blocks, block_size) int64
    return slots.flatten(-2)[..., :length]
