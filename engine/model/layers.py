"""The pieces of a decoder layer as plain functions and small classes over tensors.

No `nn.Module`: there is no training here, and a step on the CPU makes hundreds of these calls.
"""

import torch
from torch import Tensor
from torch.nn import functional

from engine.model.config import ModelConfig
from engine.model.rotary import rotary_table

# oneDNN picks its weight layout for a batch size. Measured on two Zen 4 cores (float32 and bfloat16): the
# layout for 64 rows is as quick as any other for every batch from 1 to 512, the one for 1 row is not.
_PACKED_FOR_ROWS = 64


class Linear:
    """`x @ weight.T + bias`, with the weight packed for the CPU where torch can do that.

    Packing makes products with few rows two to three times as quick (float32, 1 to 8 rows) and those
    with 64 rows 1.4 times.
    """

    __slots__ = ("_bias", "_is_packed", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Take weight (out, in) and bias (out). The weight given may be freed afterwards."""
        self._bias = bias
        self._is_packed = weight.device.type == "cpu" and _can_pack()
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS) if self._is_packed else weight  # noqa: SLF001
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Return (rows, out) for x (rows, in)."""
        if self._is_packed:
            packed: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")  # noqa: SLF001
            return packed  # (rows, out)
        return functional.linear(x, self._weight, self._bias)  # (rows, out)


def _can_pack() -> bool:
    return (
        torch._C._has_mkldnn  # noqa: SLF001
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale the last dimension of x to unit root mean square, in float32, then by `weight`."""
    wide = x.float()  # x's shape, float32
    inverse = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()  # (..., 1) float32
    return (wide * inverse).to(x.dtype) * weight  # x's shape and dtype


class RotaryTable:
    """Cosines and signed sines of the rotary angles of all positions, in float32.

    Pairs are (i, i + head_dim / 2), as in Hugging Face weights. The first half of `sin` is negated, so
    that a rotation is `x * cos + roll(x) * sin`.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_positions: int,
        device: torch.device,
        freq_factors: Tensor | None = None,
    ) -> None:
        """Compute the table; `freq_factors` (head_dim / 2) divide the frequencies (from the file)."""
        factors = None if freq_factors is None else freq_factors.float().cpu().numpy()  # (head_dim / 2)
        table = rotary_table(config, num_positions, factors)
        cos, sin = map(torch.from_numpy, table)  # 2 * (positions, head_dim / 2) float32
        self._cos = torch.cat((cos, cos), -1).to(device)  # (positions, head_dim) float32
        self._sin = torch.cat((-sin, sin), -1).to(device)  # (positions, head_dim) float32

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines (positions, head_dim), for kernels that look up by themselves."""
        return self._cos, self._sin

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines (tokens, 1, head_dim) for positions (tokens)."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (tokens, heads, head_dim) by the angles of its tokens, in float32."""
    wide = x.float()  # (tokens, heads, head_dim) float32
    swapped = wide.roll(x.shape[-1] // 2, -1)  # (tokens, heads, head_dim) float32
    return torch.addcmul(wide * cos, swapped, sin).to(x.dtype)  # (tokens, heads, head_dim)
