"""Causal attention of chunks of tokens over paged keys and values, in Triton.

A program computes a tile: some tokens of one sequence, times the query heads that share a key/value head, so
that also a short chunk fills the rows of its products. Keys and values of the chunk are in the cache already;
what was there before (a cached prefix, earlier chunks) is read the same way. Source of the algorithm: Dao,
"FlashAttention-2", 2023.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.device_limits import (
    DeviceLimits,
    limits_of,
    needs_upcast,
    padded_size,
    score_scale,
)
from engine.model.step import ForwardBatch


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """How the work is cut: rows (tokens times heads) and keys of a tile, warps of a program, stages.

    Rows and keys are powers of two; there are at least as many rows as heads share a key.
    """

    num_rows: int
    num_keys: int
    num_warps: int
    num_stages: int

    def shared_bytes(self, head_dim: int, dtype: torch.dtype) -> int:
        """Return how much shared memory queries, and keys and values of all stages, take at most."""
        rows = self.num_rows + 2 * self.num_stages * self.num_keys
        return rows * padded_size(head_dim) * dtype.itemsize


# 128 rows: with fewer, keys and values would come from the L2 more often than it can give them (64 rows at
# half the matrix rate of an H200 would want 6 TB/s). Three stages: a tile is asked for when the last but one
# is done with, so that it has a whole turn of the loop to come. The rest is limited by registers, which hold
# scores and sums (251 of 255 in the line for 128, nothing spilled): eight warps there. Heads of 64 do with
# four and tiles of 64 keys, so that two programs run on a multiprocessor and fill each other's gaps. Read off
# the compiled code and computed from data sheets; no GPU has measured it.
_TILES = {
    64: (PrefillTiles(128, 64, 4, 3), PrefillTiles(64, 32, 4, 3)),
    128: (PrefillTiles(128, 128, 8, 3), PrefillTiles(128, 64, 8, 3), PrefillTiles(64, 32, 4, 3)),
    256: (PrefillTiles(128, 32, 8, 3), PrefillTiles(64, 32, 4, 2), PrefillTiles(64, 16, 4, 2)),
}
# No tensor cores there: each thread keeps what it multiplies in registers.
_FLOAT32_TILES = {
    64: PrefillTiles(32, 32, 8, 2),
    128: PrefillTiles(32, 32, 8, 2),
    256: PrefillTiles(16, 16, 8, 2),
}

_SPARE_BYTES = 2 << 10
"""Shared memory for sums over warps and the like."""


@dataclass(frozen=True, slots=True)
class PrefillOptions:
    """What may be chosen beside the batch.

    `window`: tokens that each token sees, itself included, 0 for all. `tiles`: for tests and measurements,
    None for what suits the device.
    """

    window: int = 0
    tiles: PrefillTiles | None = None


def choose_tiles(head_dim: int, dtype: torch.dtype, group: int, limits: DeviceLimits) -> PrefillTiles:
    """Return the largest tiles that a device has room for; `group` query heads share a key."""
    width = max(64, padded_size(head_dim))
    candidates = _TILES[width] if dtype.itemsize == 2 else (_FLOAT32_TILES[width],)  # noqa: PLR2004 - bytes
    room = limits.shared_memory - _SPARE_BYTES
    fitting = (tiles for tiles in candidates if tiles.shared_bytes(head_dim, dtype) <= room)
    tiles = next(fitting, candidates[-1])
    num_rows = max(tiles.num_rows, padded_size(group))
    return PrefillTiles(num_rows, tiles.num_keys, tiles.num_warps, tiles.num_stages)


def paged_prefill(
    query: Tensor,
    cache: tuple[Tensor, Tensor],
    batch: ForwardBatch,
    output: Tensor,
    options: PrefillOptions | None = None,
) -> None:
    """Write the attention of all sequences but the first `batch.num_decodes`.

    query (rows, heads, head_dim), contiguous but for the step from row to row, and output (rows, heads,
    head_dim), contiguous, hold the rows of all sequences; `cache`: keys and values (blocks, block_size,
    kv_heads, head_dim) of the layer. A sequence of no tokens reads nothing and gets zeros; rows of no
    sequence get nothing.
    """
    options = options or PrefillOptions()
    keys, values = cache
    _, block_size, num_kv_heads, head_dim = keys.shape
    first, num_sequences = batch.num_decodes, len(batch.context_lens) - batch.num_decodes
    group = query.shape[1] // num_kv_heads
    tiles = options.tiles or choose_tiles(head_dim, keys.dtype, group, limits_of(query.device))
    # A bound that needs no number from the device: each sequence has at most one tile that is not full.
    num_tiles = (len(query) - first) // (tiles.num_rows // group) + num_sequences
    _prefill_kernel[num_kv_heads, num_tiles](
        query, keys, values, batch.block_tables, batch.query_starts, batch.context_lens, output,
        score_scale(head_dim), query.stride(0), batch.block_tables.stride(0), first, num_sequences,
        GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, WINDOW=options.window,
        UPCAST=needs_upcast(keys.dtype), BLOCK_M=tiles.num_rows, BLOCK_N=tiles.num_keys,
        BLOCK_D=padded_size(head_dim), num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


# ---- kernels

# What changes from step to step and must not make Triton compile a kernel anew: see `paged_decode.py`.
_CHANGING = ["block_tables", "query_starts", "context_lens", "table_stride", "first", "num_sequences"]


@triton.jit
def _find_sequence(query_starts, first, num_sequences, tile, BLOCK_Q: tl.constexpr):
    """Return the sequence of a tile, and which of its tokens is the tile's first one.

    Sequence i, counted from `first`, has the tiles from `start(i) // BLOCK_Q + i`, where `start` counts rows:
    enough for all its tokens, at most one too many.
    """
    base = tl.load(query_starts + first)
    low, high = 0, num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        first_tile = (tl.load(query_starts + first + middle) - base) // BLOCK_Q + middle
        low = tl.where(first_tile <= tile, middle, low)
        high = tl.where(first_tile <= tile, high, middle)
    first_tile = (tl.load(query_starts + first + low) - base) // BLOCK_Q + low
    return first + low, (tile - first_tile) * BLOCK_Q


@triton.jit
def _attend(
    acc, total, peak, q, position, start, end, keys, values, table, row_size, scale, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, IS_MASKED: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add what queries (BLOCK_M, BLOCK_D) at `position` see in tokens [start, end): tiles from `start` on.

    Without a mask, every query sees all tokens of every tile.
    """
    BLOCK_D: tl.constexpr = q.shape[1]
    dim = tl.arange(0, BLOCK_D)[None, :]
    token = start + tl.arange(0, BLOCK_N)
    block = tl.load(table + token // BLOCK_SIZE, token < end, 0)
    for first in tl.range(start, end, BLOCK_N):
        token = first + tl.arange(0, BLOCK_N)
        slot = block.to(tl.int64) * BLOCK_SIZE + token % BLOCK_SIZE
        # The table is read a tile ahead, as in the kernel for single tokens.
        ahead = token + BLOCK_N
        block = tl.load(table + ahead // BLOCK_SIZE, ahead < end, 0)
        place = slot[:, None] * row_size + dim
        is_read = dim < HEAD_DIM
        if IS_MASKED:
            is_read = is_read & (token < end)[:, None]
        k = tl.load(keys + place, is_read, 0.0)
        v = tl.load(values + place, is_read, 0.0)
        if UPCAST:
            k, v = k.to(tl.float32), v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if IS_MASKED:
            is_visible = token[None, :] <= position[:, None]
            if WINDOW > 0:
                is_visible &= token[None, :] > position[:, None] - WINDOW
            scores = tl.where(is_visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
        base = new_peak
        if IS_MASKED and WINDOW > 0:
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # nothing seen so far
        weights = tl.exp2(scores * scale - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        peak = new_peak
    return acc, total, peak


@triton.jit
def _attend_tile(
    q, position, lowest, end, keys, values, table, row_size, scale, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, UPCAST: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return what queries (BLOCK_M, BLOCK_D) see, whose positions are in [lowest, end).

    Only tiles on the diagonal and at the edge of the window are masked.
    """
    is_masked: tl.constexpr = True
    is_full: tl.constexpr = False
    peak = tl.full((q.shape[0],), float("-inf"), tl.float32)
    total = tl.zeros((q.shape[0],), tl.float32)
    acc = tl.zeros(q.shape, tl.float32)
    full_start = 0
    full_end = tl.maximum(lowest + 1, 0) // BLOCK_N * BLOCK_N  # below 0: padding, which has no context
    if WINDOW > 0:
        start = tl.maximum(lowest - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        full_start = tl.cdiv(tl.maximum(end - WINDOW, 0), BLOCK_N) * BLOCK_N
        full_end = tl.maximum(full_end, full_start)
        acc, total, peak = _attend(
            acc, total, peak, q, position, start, tl.minimum(full_start, end), keys, values, table, row_size,
            scale, HEAD_DIM, BLOCK_SIZE, WINDOW, is_masked, UPCAST, BLOCK_N,
        )  # fmt: skip
    acc, total, peak = _attend(
        acc, total, peak, q, position, full_start, full_end, keys, values, table, row_size,
        scale, HEAD_DIM, BLOCK_SIZE, WINDOW, is_full, UPCAST, BLOCK_N,
    )  # fmt: skip
    acc, total, peak = _attend(
        acc, total, peak, q, position, full_end, end, keys, values, table, row_size,
        scale, HEAD_DIM, BLOCK_SIZE, WINDOW, is_masked, UPCAST, BLOCK_N,
    )  # fmt: skip
    return acc / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit(do_not_specialize=_CHANGING)
def _prefill_kernel(
    query, keys, values, block_tables, query_starts, context_lens, output, scale, query_stride, table_stride,
    first, num_sequences, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, UPCAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute one tile: BLOCK_M // GROUP tokens of a sequence, for the query heads of one key/value head."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head, num_kv_heads = tl.program_id(0), tl.num_programs(0)
    # The last tiles of a chunk see most: they are begun first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    sequence, first_query = _find_sequence(query_starts, first, num_sequences, tile, BLOCK_Q)
    first_row = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - first_row
    if first_query >= num_queries:
        return
    context = tl.load(context_lens + sequence)
    index = tl.arange(0, BLOCK_M)
    offset = first_query + index // GROUP
    head = kv_head * GROUP + index % GROUP
    dim = tl.arange(0, BLOCK_D)[None, :]
    is_row = (index < BLOCK_Q * GROUP) & (offset < num_queries)
    is_used = is_row[:, None] & (dim < HEAD_DIM)
    row = (first_row + offset).to(tl.int64)
    q = tl.load(query + (row * query_stride + head * HEAD_DIM)[:, None] + dim, is_used, 0.0)
    if UPCAST:
        q = q.to(tl.float32)
    first_position = context - num_queries
    lowest = first_position + first_query
    attended = _attend_tile(
        q, first_position + offset, lowest, tl.minimum(lowest + BLOCK_Q, context),
        keys + kv_head * HEAD_DIM, values + kv_head * HEAD_DIM,
        block_tables + sequence.to(tl.int64) * table_stride, num_kv_heads * HEAD_DIM, scale, HEAD_DIM,
        BLOCK_SIZE, WINDOW, UPCAST, BLOCK_N,
    )  # fmt: skip
    place = (row * num_kv_heads * GROUP + head)[:, None] * HEAD_DIM + dim
    tl.store(output + place, attended.to(output.dtype.element_ty), is_used)
