"""Root mean square norms, with or without the sum before them, in one pass over memory, in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_NUMBERS_PER_WARP = 256
_MAX_WARPS = 16


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale the last dimension of x to unit root mean square, in float32, then by `weight`."""
    x = x.contiguous()  # (..., hidden_size)
    normed = torch.empty_like(x)  # (..., hidden_size)
    _launch(x, x, weight, normed, eps, adds=False)
    return normed


def add_rms_norm(hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `delta` to `hidden` (tokens, hidden_size), contiguous, in place; return the norm of the sum."""
    assert hidden.is_contiguous()
    normed = torch.empty_like(hidden)  # (tokens, hidden_size)
    _launch(hidden, delta.contiguous(), weight, normed, eps, adds=True)
    return normed


def _launch(x: Tensor, delta: Tensor, weight: Tensor, normed: Tensor, eps: float, *, adds: bool) -> None:
    size = x.shape[-1]
    num_rows = x.numel() // size
    if num_rows == 0:
        return
    block = triton.next_power_of_2(size)
    num_warps = max(1, min(block // _NUMBERS_PER_WARP, _MAX_WARPS))
    _norm_kernel[(num_rows,)](
        x, delta, weight, normed, eps, SIZE=size, ADDS=adds, BLOCK=block, num_warps=num_warps
    )


@triton.jit
def _norm_kernel(
    x, delta, weight, normed, eps, SIZE: tl.constexpr, ADDS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Norm one row, rounded where plain torch rounds: the sum, the scaled numbers, their products."""
    column = tl.arange(0, BLOCK)
    is_column = column < SIZE
    start = tl.program_id(0).to(tl.int64) * SIZE
    x += start + column
    wide = tl.load(x, is_column, 0.0).to(tl.float32)
    if ADDS:
        wide += tl.load(delta + start + column, is_column, 0.0).to(tl.float32)
        rounded = wide.to(x.dtype.element_ty)
        tl.store(x, rounded, is_column)
        wide = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    scaled = (wide * inverse).to(normed.dtype.element_ty).to(tl.float32)
    scaled *= tl.load(weight + column, is_column, 0.0).to(tl.float32)
    tl.store(normed + start + column, scaled.to(normed.dtype.element_ty), is_column)
