"""The gate of a feed-forward layer in one pass over memory, in Triton."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return `silu(gate) * up` (tokens, n), computed in float32, for both side by side (tokens, 2 * n)."""
    gate_up = gate_up.contiguous()  # (tokens, 2 * n)
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    gated = gate_up.new_empty((num_rows, size))  # (tokens, n)
    if num_rows:
        block = min(_BLOCK, triton.next_power_of_2(size))
        _silu_mul_kernel[num_rows, triton.cdiv(size, block)](gate_up, gated, SIZE=size, BLOCK=block)
    return gated


@triton.jit
def _silu_mul_kernel(gate_up, gated, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Gate a part of a row, rounded where plain torch rounds: after the function, after the product."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < SIZE
    gate_up += row * (2 * SIZE) + column
    gate = tl.load(gate_up, is_column, 0.0).to(tl.float32)
    up = tl.load(gate_up + SIZE, is_column, 0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(gated.dtype.element_ty).to(tl.float32)
    tl.store(gated + row * SIZE + column, (activated * up).to(gated.dtype.element_ty), is_column)
