"""The `LayerOps` of the Triton kernels: each in one pass over memory."""

from torch import Tensor

from engine.kernels.triton.gated import silu_mul
from engine.kernels.triton.norms import add_rms_norm, rms_norm
from engine.kernels.triton.rope_store import rotate_and_store
from engine.model.layer_ops import HeadNorms, HeadShape
from engine.model.layers import RotaryTable
from engine.model.step import ForwardBatch


class TritonOps:
    """What a decoder layer does beside its products and its attention, rounded as in plain torch."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Scale the last dimension of x to unit root mean square, then by `weight`."""
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add `delta` to `hidden` (tokens, hidden_size) in place; return the norm of the sum."""
        return add_rms_norm(hidden, delta, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return `silu(gate) * up` (tokens, n) for both side by side (tokens, 2 * n)."""
        return silu_mul(gate_up)

    def rotate_and_store(
        self,
        qkv: Tensor,
        shape: HeadShape,
        norms: HeadNorms | None,
        rotary: RotaryTable,
        cache: tuple[Tensor, Tensor],
        batch: ForwardBatch,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Norm and rotate queries and keys, write keys and values to the step's slots.

        In place: qkv holds the result, and what is returned are views of it.
        """
        return rotate_and_store(qkv, shape, norms, rotary, cache, batch)
