"""What kernels beside attention are compared with, the same arithmetic in float64; and how far off one is."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x, its last dimension scaled to unit root mean square and by the weight."""
    wide = x.double()  # x's shape
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return `silu(gate) * up` (tokens, n) for both side by side (tokens, 2 * n)."""
    gate, up = gate_up.double().chunk(2, -1)  # 2 * (tokens, n)
    return gate * gate.sigmoid() * up  # (tokens, n)


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + head_dim / 2) of x (tokens, heads, head_dim); angles (tokens, 1, head_dim).

    The first half of the sines is negated, as `RotaryTable.at` gives them.
    """
    wide = x.double()  # (tokens, heads, head_dim)
    return wide * cos.double() + wide.roll(x.shape[-1] // 2, -1) * signed_sin.double()


def largest_error(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference in a row (the last dimension) over the row's largest number.

    Infinite where something is not finite.
    """
    scale = expected.abs().amax(-1, keepdim=True).clamp_min(1e-30)  # (..., 1)
    error = ((found.double() - expected).abs() / scale).max().item()
    return error if torch.isfinite(found).all() else float("inf")
