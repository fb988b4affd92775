"""Attention of sequences that compute one token each, over paged keys and values, in Triton.

Memory sets the pace: keys and values are read once for all query heads that share them, and enough of them
are on their way at any time. Where there are few sequences, their contexts are cut into splits for other
multiprocessors to compute, and a second kernel joins those (Dao et al., "Flash-Decoding for long-context
inference", 2023).
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.device_limits import (
    MIN_BLOCK,
    DeviceLimits,
    limits_of,
    needs_upcast,
    padded_size,
    score_scale,
)
from engine.model.step import ForwardBatch

MAX_SPLITS = 64
"""What the kernel that joins them holds at a time."""

_MIN_SPLIT_TOKENS = 256
"""Shorter splits would be joined for longer than they are computed: reasoned, not measured."""

_PROGRAMS_PER_PROCESSOR = 3
"""Programs that each multiprocessor should find: as many run at a time, see `DecodeTiles`."""

_TILE_BYTES, _SMALL_TILE_BYTES = 16 << 10, 8 << 10
_MAX_TILE_TOKENS = 128


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """How a context is cut: tokens of a tile (a power of two), warps of a program, stages of its loop.

    With three stages two tiles are in shared memory: while one is computed, the next is on its way, and the
    one after that is asked for as soon as the first is done with. Tiles of 16 KiB of keys and as much of
    values take 70 KiB, so that three programs run on a multiprocessor of an H100 or H200 (227 KiB), with 96
    KiB on their way. 4.8 TB/s (the data sheet's) over 132 multiprocessors with a microsecond of latency need
    36 KiB. Four warps ask for such a tile with sixteen copies of 16 bytes per thread, from global to shared
    memory, past registers and L1. Sizes and copies are read off the compiled code; no GPU has measured it.
    """

    num_tokens: int
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """What may be chosen beside the batch.

    `window`: tokens that each token sees, itself included, 0 for all. `num_splits` (1 to `MAX_SPLITS`) and
    `tiles` are for tests and measurements: None for what suits batch and device.
    """

    window: int = 0
    num_splits: int | None = None
    tiles: DecodeTiles | None = None


def choose_tiles(head_dim: int, dtype: torch.dtype, limits: DeviceLimits) -> DecodeTiles:
    """Return the tiles for keys of `head_dim` numbers: 16 KiB, or 8 where two such programs have no room."""
    is_large = limits.shared_memory >= 9 * _TILE_BYTES  # twice two tiles of keys and values, and some more
    num_bytes = _TILE_BYTES if is_large else _SMALL_TILE_BYTES
    num_tokens = num_bytes // (padded_size(head_dim) * dtype.itemsize)
    return DecodeTiles(max(MIN_BLOCK, min(num_tokens, _MAX_TILE_TOKENS)))


def choose_num_splits(
    num_sequences: int, num_kv_heads: int, max_context_len: int, num_processors: int
) -> int:
    """Return into how many splits each context is cut; 1 where there are programs enough without.

    The shape of the batch decides alone, and a bound of its contexts: a CUDA graph replays what it captured.
    """
    wanted = -(-_PROGRAMS_PER_PROCESSOR * num_processors // (num_sequences * num_kv_heads))
    return max(1, min(wanted, -(-max_context_len // _MIN_SPLIT_TOKENS), MAX_SPLITS))


def paged_decode(
    query: Tensor,
    cache: tuple[Tensor, Tensor],
    batch: ForwardBatch,
    output: Tensor,
    options: DecodeOptions | None = None,
) -> None:
    """Write the attention of the first `batch.num_decodes` rows, one for each of as many sequences.

    query (rows, heads, head_dim), contiguous but for the step from row to row; `cache`: keys and values
    (blocks, block_size, kv_heads, head_dim) of the layer; output (rows, heads, head_dim), contiguous. A
    sequence of no tokens reads nothing and gets zeros.
    """
    options = options or DecodeOptions()
    keys, values = cache
    _, block_size, num_kv_heads, head_dim = keys.shape
    num_sequences, num_heads = batch.num_decodes, query.shape[1]
    limits = limits_of(query.device)
    tiles = options.tiles or choose_tiles(head_dim, keys.dtype, limits)
    num_splits = options.num_splits or choose_num_splits(
        num_sequences, num_kv_heads, batch.max_context_len, limits.num_processors
    )
    partial = log_sums = output
    if num_splits > 1:
        rows = (num_sequences, num_heads, num_splits)
        partial = torch.empty((*rows, head_dim), dtype=torch.float32, device=query.device)
        log_sums = torch.empty(rows, dtype=torch.float32, device=query.device)
    sizes: dict[str, Any] = {
        "HEAD_DIM": head_dim,
        "WINDOW": options.window,
        "BLOCK_N": tiles.num_tokens,
        "BLOCK_D": padded_size(head_dim),
    }
    group = num_heads // num_kv_heads
    _decode_kernel[num_kv_heads, num_splits, num_sequences](
        query, keys, values, batch.block_tables, batch.context_lens, output, partial, log_sums,
        score_scale(head_dim), query.stride(0), batch.block_tables.stride(0), num_splits,
        GROUP=group, BLOCK_SIZE=block_size, IS_SPLIT=num_splits > 1, UPCAST=needs_upcast(keys.dtype),
        BLOCK_G=padded_size(group), **sizes, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if num_splits > 1:
        _join_kernel[num_heads, num_sequences](
            partial, log_sums, batch.context_lens, output, num_splits, MAX_SPLITS=MAX_SPLITS, **sizes
        )


# ---- kernels

# Triton compiles a kernel anew when an argument begins or ceases to be 1, or a multiple of 16 (pointers too).
# Not for these, which change from step to step.
_CHANGING = ["block_tables", "context_lens", "table_stride", "num_splits"]


@triton.jit
def _split_starts(context, splits, num_splits, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return where splits start: whole tiles, shared out evenly. Split `num_splits` starts at the end."""
    first_tile = 0
    if WINDOW > 0:
        first_tile = tl.maximum(context - WINDOW, 0) // BLOCK_N
    num_tiles = tl.cdiv(context, BLOCK_N) - first_tile
    return tl.minimum((first_tile + num_tiles * splits // num_splits) * BLOCK_N, context)


@triton.jit
def _attend(
    q, keys, values, table, start, end, lowest, row_size, scale, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, UPCAST: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return what queries (BLOCK_G, BLOCK_D) see in tokens [start, end), and the logarithms of their sums."""
    BLOCK_G: tl.constexpr = q.shape[0]
    BLOCK_D: tl.constexpr = q.shape[1]
    dim = tl.arange(0, BLOCK_D)[None, :]
    peak = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    # Summed up at the end only: a sum over the tokens of a tile is one over the warps, with a barrier.
    totals = tl.zeros((BLOCK_G, BLOCK_N), tl.float32)
    acc = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    token = start + tl.arange(0, BLOCK_N)
    block = tl.load(table + token // BLOCK_SIZE, token < end, 0)
    for first in tl.range(start, end, BLOCK_N):
        token = first + tl.arange(0, BLOCK_N)
        is_visible = token < end
        if WINDOW > 0:
            is_visible &= token >= lowest
        slot = block.to(tl.int64) * BLOCK_SIZE + token % BLOCK_SIZE
        # The table is read a tile ahead, so that the addresses of keys and values are known when they are
        # asked for; did they wait for it in the same turn, Triton would hold one tile at a time, not two.
        ahead = token + BLOCK_N
        block = tl.load(table + ahead // BLOCK_SIZE, ahead < end, 0)
        place = slot[:, None] * row_size + dim
        is_read = is_visible[:, None] & (dim < HEAD_DIM)
        # No hint to evict them first: sequences that share a prefix find each other's blocks in the L2.
        k = tl.load(keys + place, is_read, 0.0)
        v = tl.load(values + place, is_read, 0.0)
        if UPCAST:
            k, v = k.to(tl.float32), v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(is_visible[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)[:, None]
        totals = totals * shrink + weights
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink, input_precision="ieee")
        peak = new_peak
    total = tl.sum(totals, 1)
    total = tl.where(total > 0, total, 1.0)  # 0: nothing seen, which gives zeros
    return acc / total[:, None], peak + tl.log2(total)


@triton.jit(do_not_specialize=_CHANGING)
def _decode_kernel(
    query, keys, values, block_tables, context_lens, output, partial, log_sums, scale, query_stride,
    table_stride, num_splits, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, IS_SPLIT: tl.constexpr, UPCAST: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute one split of one sequence for the query heads of one key/value head.

    Few of the BLOCK_G rows may be heads: tensor cores take 16 at least, and there is time for it.
    """
    # Key/value heads of a token lie side by side: neighbouring programs read neighbouring memory. The longest
    # contexts are the last of a batch; they are begun first, so that none of them is left over at the end.
    kv_head, split, num_kv_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    sequence = tl.num_programs(2) - 1 - tl.program_id(2)
    context = tl.load(context_lens + sequence)
    start = _split_starts(context, split, num_splits, WINDOW, BLOCK_N)
    end = _split_starts(context, split + 1, num_splits, WINDOW, BLOCK_N)
    if IS_SPLIT and start >= end:
        return
    index = tl.arange(0, BLOCK_G)
    head = kv_head * GROUP + index
    dim = tl.arange(0, BLOCK_D)[None, :]
    is_used = (index < GROUP)[:, None] & (dim < HEAD_DIM)
    sequence = sequence.to(tl.int64)
    q = tl.load(query + sequence * query_stride + head[:, None] * HEAD_DIM + dim, is_used, 0.0)
    if UPCAST:
        q = q.to(tl.float32)
    attended, log_sum = _attend(
        q, keys + kv_head * HEAD_DIM, values + kv_head * HEAD_DIM, block_tables + sequence * table_stride,
        start, end, context - WINDOW, num_kv_heads * HEAD_DIM, scale, HEAD_DIM, BLOCK_SIZE, WINDOW, UPCAST,
        BLOCK_N,
    )  # fmt: skip
    row = sequence * num_kv_heads * GROUP + head
    if IS_SPLIT:
        row = row * num_splits + split
        tl.store(log_sums + row, log_sum, index < GROUP)
        tl.store(partial + row[:, None] * HEAD_DIM + dim, attended, is_used)
    else:
        tl.store(output + row[:, None] * HEAD_DIM + dim, attended.to(output.dtype.element_ty), is_used)


@triton.jit(do_not_specialize=_CHANGING)
def _join_kernel(
    partial, log_sums, context_lens, output, num_splits, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr,
    MAX_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Join the splits of one head of one sequence, weighted by the sums that each has seen."""
    head, sequence = tl.program_id(0), tl.program_id(1)
    context = tl.load(context_lens + sequence)
    split = tl.arange(0, MAX_SPLITS)
    start = _split_starts(context, split, num_splits, WINDOW, BLOCK_N)
    end = _split_starts(context, split + 1, num_splits, WINDOW, BLOCK_N)
    is_filled = (split < num_splits) & (start < end)
    dim = tl.arange(0, BLOCK_D)
    row = sequence.to(tl.int64) * tl.num_programs(0) + head
    part = row * num_splits + split
    log_sum = tl.load(log_sums + part, is_filled, float("-inf"))
    peak = tl.where(context > 0, tl.max(log_sum, 0), 0.0)  # padding has no splits
    weight = tl.where(is_filled, tl.exp2(log_sum - peak), 0.0)
    is_read = is_filled[:, None] & (dim < HEAD_DIM)[None, :]
    attended = tl.load(partial + part[:, None] * HEAD_DIM + dim[None, :], is_read, 0.0)
    total = tl.sum(weight, 0)
    joined = tl.sum(attended * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(output + row * HEAD_DIM + dim, joined.to(output.dtype.element_ty), dim < HEAD_DIM)
