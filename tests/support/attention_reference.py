"""Paged attention as its definition says, in float64, and batches of it to try kernels on, on any device.

Nothing of the engine's arithmetic is in it. What no sequence has written is NaN: whatever reads it shows it.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.model.step import ForwardBatch, StepInputs, to_device

_QUERIES_AT_A_TIME = 256

TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""How far a kernel may be off, absolutely and relatively, for numbers from a normal distribution."""


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of a model and of its cache; `group` query heads share a key/value head."""

    head_dim: int
    group: int
    num_kv_heads: int = 2
    block_size: int = 16

    @property
    def num_heads(self) -> int:
        return self.group * self.num_kv_heads


@dataclass
class AttentionCase:
    """A step: rows of queries, the cache with everything in it, and where each sequence's tokens lie."""

    query: Tensor  # (rows, heads, head_dim)
    new: tuple[Tensor, Tensor]  # 2 * (rows, kv_heads, head_dim)
    cache: tuple[Tensor, Tensor]  # 2 * (blocks, block_size, kv_heads, head_dim)
    inputs: StepInputs
    batch: ForwardBatch
    slots: list[Tensor]  # for each sequence (context) int64

    def expected(self, window: int = 0) -> Tensor:
        """Return the attention (rows, heads * head_dim) float64; zeros for padding."""
        output = torch.zeros(self.query.shape, dtype=torch.float64, device=self.query.device)
        keys, values = (part.flatten(0, 1) for part in self.cache)  # 2 * (slots, kv_heads, head_dim)
        starts = self.inputs.query_starts.tolist()
        for index, slots in enumerate(self.slots):
            rows = slice(starts[index], starts[index + 1])
            if len(slots):
                output[rows] = attend_in_float64(self.query[rows], keys[slots], values[slots], window)
        return output.flatten(1)

    def with_padding(self, num_padding: int) -> "AttentionCase":
        """Return the step, which computes one token per sequence, with so many rows more of no sequence.

        Their block tables name blocks that do not exist.
        """
        inputs = self.inputs
        assert inputs.num_decodes == inputs.num_sequences
        num_rows = inputs.num_sequences + num_padding
        inputs = StepInputs(
            input_ids=np.pad(inputs.input_ids, (0, num_padding)),
            positions=np.pad(inputs.positions, (0, num_padding)),
            slot_mapping=np.pad(inputs.slot_mapping, (0, num_padding), constant_values=-1),
            query_starts=np.arange(num_rows + 1, dtype=np.int32),
            context_lens=np.pad(inputs.context_lens, (0, num_padding)),
            block_tables=np.pad(inputs.block_tables, ((0, num_padding), (0, 0)), constant_values=1 << 30),
            logits_rows=inputs.logits_rows,
            num_decodes=num_rows,
            block_size=inputs.block_size,
        )
        batch = to_device(inputs, self.query.device)
        batch.has_padding = True
        extra = self.query.new_full((num_padding, *self.query.shape[1:]), torch.nan)
        extra_new = self.new[0].new_full((num_padding, *self.new[0].shape[1:]), torch.nan)
        new = (torch.cat((self.new[0], extra_new)), torch.cat((self.new[1], extra_new)))
        slots = [*self.slots, *(self.slots[0][:0] for _ in range(num_padding))]
        return AttentionCase(torch.cat((self.query, extra)), new, self.cache, inputs, batch, slots)


def attend_in_float64(query: Tensor, keys: Tensor, values: Tensor, window: int = 0) -> Tensor:
    """Return causal attention (rows, heads, head_dim) of the last rows of a sequence, in float64.

    query (rows, heads, head_dim); keys and values (context, kv_heads, head_dim) of all tokens up to the last
    row's. Each row sees `window` tokens, its own included; all if 0.
    """
    num_rows, num_heads, head_dim = query.shape
    context, num_kv_heads, _ = keys.shape
    key, value = keys.double(), values.double()
    token = torch.arange(context, device=query.device)  # (context) int64
    output = torch.empty(query.shape, dtype=torch.float64, device=query.device)
    for start in range(0, num_rows, _QUERIES_AT_A_TIME):
        rows = slice(start, min(start + _QUERIES_AT_A_TIME, num_rows))
        wide = query[rows].double().view(-1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        scores = torch.einsum("qkgd,tkd->kgqt", wide, key) / math.sqrt(head_dim)
        position = context - num_rows + torch.arange(rows.start, rows.stop, device=query.device)[:, None]
        is_hidden = token > position  # (rows, context) bool
        if window:
            is_hidden |= token <= position - window
        weights = scores.masked_fill(is_hidden, -torch.inf).softmax(-1)
        output[rows] = torch.einsum("kgqt,tkd->qkgd", weights, value).flatten(1, 2)
    return output


def make_case(
    shape: AttentionShape,
    sequences: list[tuple[int, int]],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    seed: int = 0,
    garbage: int | None = None,
) -> AttentionCase:
    """Return a step of random numbers for sequences of (context, tokens computed), single tokens first.

    Blocks lie in any order. Block tables end in `garbage`, by default the id of a block that is all NaN.
    """
    counts = [count for _, count in sequences]
    num_decodes = sum(count == 1 for count in counts)
    assert all(count == 1 for count in counts[:num_decodes]), "single tokens come first"
    device, generator = torch.device(device), torch.Generator(device).manual_seed(seed)
    rng = np.random.default_rng(seed)
    block_size = shape.block_size
    num_used = [-(-context // block_size) for context, _ in sequences]
    num_blocks = sum(num_used) + 1
    order = rng.permutation(num_blocks).astype(np.int32)
    fill = order[-1] if garbage is None else garbage
    tables = np.full((len(sequences), max(num_used) + 2), fill, np.int32)  # (sequences, width)
    kv = torch.full(
        (2, num_blocks * block_size, shape.num_kv_heads, shape.head_dim),
        torch.nan,
        dtype=dtype,
        device=device,
    )  # (2, slots, kv_heads, head_dim)
    slots, start = [], 0
    for index, (context, _) in enumerate(sequences):
        tables[index, : num_used[index]] = order[start : start + num_used[index]]
        start += num_used[index]
        token = np.arange(context)
        places = tables[index, token // block_size].astype(np.int64) * block_size + token % block_size
        slots.append(torch.from_numpy(places).to(device))
        numbers = torch.randn((2, context, *kv.shape[2:]), generator=generator, device=device)
        kv[:, slots[-1]] = numbers.to(dtype)
    inputs = _make_inputs(sequences, tables, slots, num_decodes, block_size)
    rows = torch.from_numpy(inputs.slot_mapping).long().to(device)  # (rows) int64
    size = (len(rows), shape.num_heads, shape.head_dim)
    query = torch.randn(size, generator=generator, device=device).to(dtype)
    cache = tuple(part.unflatten(0, (num_blocks, block_size)) for part in kv)
    return AttentionCase(
        query, (kv[0, rows], kv[1, rows]), (cache[0], cache[1]), inputs, to_device(inputs, device), slots
    )


def _make_inputs(
    sequences: list[tuple[int, int]],
    tables: "np.ndarray[tuple[int, int], np.dtype[np.int32]]",
    slots: list[Tensor],
    num_decodes: int,
    block_size: int,
) -> StepInputs:
    counts = [count for _, count in sequences]
    positions = [np.arange(context - count, context) for context, count in sequences]
    written = [part[-count:].cpu().numpy() for part, count in zip(slots, counts, strict=True)]
    starts = np.cumsum([0, *counts])
    return StepInputs(
        input_ids=np.zeros(starts[-1], np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        slot_mapping=np.concatenate(written).astype(np.int32),
        query_starts=starts.astype(np.int32),
        context_lens=np.array([context for context, _ in sequences], np.int32),
        block_tables=tables,
        logits_rows=(starts[1:] - 1).astype(np.int32),
        num_decodes=num_decodes,
        block_size=block_size,
    )
