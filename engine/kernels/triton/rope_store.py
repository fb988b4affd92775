"""From stacked queries, keys and values to what attention reads, in one pass over memory, in Triton.

Norms of the heads (Qwen3), rotation, and the way of keys and values into the cache.
"""

import triton
import triton.language as tl
from torch import Tensor

from engine.model.layer_ops import HeadNorms, HeadShape
from engine.model.layers import RotaryTable
from engine.model.step import ForwardBatch

_HALF_HEADS_NUMBERS = 512
"""Numbers of all left halves that a program has: two warps load 16 bytes per thread, left and right."""

_NUM_WARPS = 2


def rotate_and_store(
    qkv: Tensor,
    shape: HeadShape,
    norms: HeadNorms | None,
    rotary: RotaryTable,
    cache: tuple[Tensor, Tensor],
    batch: ForwardBatch,
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm and rotate queries and keys of qkv (tokens, (heads + 2 * kv_heads) * head_dim) in place.

    Keys and values are written to the step's slots of `cache` (blocks, block_size, kv_heads, head_dim) too,
    rows with a negative slot nowhere. Returns views of qkv: query (tokens, heads, head_dim), key and value
    (tokens, kv_heads, head_dim).
    """
    assert qkv.is_contiguous()
    num_heads, num_kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    num_rows = num_heads + 2 * num_kv_heads
    half = head_dim // 2
    block_d = triton.next_power_of_2(half)
    block_h = max(1, min(_HALF_HEADS_NUMBERS // block_d, triton.next_power_of_2(num_rows)))
    cosines, sines = rotary.tables
    rows = qkv.view(-1, num_rows, head_dim)  # (tokens, heads + 2 * kv_heads, head_dim)
    if len(rows):
        # Without norms their weights are not read, but a pointer has to be given.
        weights = (norms.query, norms.key) if norms is not None else (qkv, qkv)
        _rotate_store_kernel[len(rows), triton.cdiv(num_rows, block_h)](
            qkv, *weights, cosines, sines, batch.positions, batch.slot_mapping, *cache, shape.eps,
            NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HALF=half, HAS_NORMS=norms is not None,
            BLOCK_H=block_h, BLOCK_D=block_d, num_warps=_NUM_WARPS,
        )  # fmt: skip
    return rows[:, :num_heads], rows[:, num_heads:-num_kv_heads], rows[:, -num_kv_heads:]


@triton.jit
def _norm(x, inverse, weight, is_normed):
    """Scale (BLOCK_H, BLOCK_D), rounded where plain torch rounds: after the scale, after the weight."""
    normed = (x.to(tl.float32) * inverse).to(x.dtype).to(tl.float32) * weight
    return tl.where(is_normed, normed.to(x.dtype), x)


@triton.jit(do_not_specialize=["positions", "slots"])
def _rotate_store_kernel(
    qkv, query_norm, key_norm, cosines, sines, positions, slots, keys, values, eps, NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, HAS_NORMS: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Do it for some rows (heads of queries, then keys, then values) of one token.

    A row is held as two halves, left and right, whose numbers make the pairs that are rotated.
    """
    HEAD_DIM: tl.constexpr = 2 * HALF
    NUM_ROTATED: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    NUM_ROWS: tl.constexpr = NUM_ROTATED + NUM_KV_HEADS
    token = tl.program_id(0).to(tl.int64)
    row = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    is_used = (row < NUM_ROWS) & (dim < HALF)
    is_rotated = row < NUM_ROTATED
    qkv += (token * NUM_ROWS + row) * HEAD_DIM + dim
    left = tl.load(qkv, is_used, 0.0)
    right = tl.load(qkv + HALF, is_used, 0.0)
    if HAS_NORMS:
        wide, wide_right = left.to(tl.float32), right.to(tl.float32)
        squares = tl.sum(wide * wide + wide_right * wide_right, 1)
        inverse = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        weight = tl.where(row < NUM_HEADS, query_norm, key_norm) + dim
        left = _norm(left, inverse, tl.load(weight, is_used, 0.0).to(tl.float32), is_rotated)
        right = _norm(right, inverse, tl.load(weight + HALF, is_used, 0.0).to(tl.float32), is_rotated)
    # The table's sines are signed for the left half: the right half's are the angle's own.
    angle = tl.load(positions + token).to(tl.int64) * HEAD_DIM + HALF + dim
    cosine = tl.load(cosines + angle, dim < HALF, 0.0)
    sine = tl.load(sines + angle, dim < HALF, 0.0)
    wide, wide_right = left.to(tl.float32), right.to(tl.float32)
    left = tl.where(is_rotated, (wide * cosine - wide_right * sine).to(left.dtype), left)
    right = tl.where(is_rotated, (wide_right * cosine + wide * sine).to(right.dtype), right)
    tl.store(qkv, left, is_used & is_rotated)
    tl.store(qkv + HALF, right, is_used & is_rotated)
    slot = tl.load(slots + token).to(tl.int64)
    is_key = is_used & (slot >= 0) & (row >= NUM_HEADS) & is_rotated
    place = (slot * NUM_KV_HEADS + row - NUM_HEADS) * HEAD_DIM + dim
    tl.store(keys + place, left, is_key)
    tl.store(keys + place + HALF, right, is_key)
    is_value = is_used & (slot >= 0) & (row >= NUM_ROTATED)
    place -= NUM_KV_HEADS * HEAD_DIM
    tl.store(values + place, left, is_value)
    tl.store(values + place + HALF, right, is_value)
