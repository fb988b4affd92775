"""The `AttentionBackend` of the Triton kernels: single tokens in one, chunks in the other."""

import torch
from torch import Tensor

from engine.kernels.triton.device_limits import IS_INTERPRETED
from engine.kernels.triton.paged_decode import DecodeOptions, paged_decode
from engine.kernels.triton.paged_prefill import PrefillOptions, paged_prefill
from engine.model.step import ForwardBatch, StepInputs

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MIN_HEAD_DIM, _MAX_HEAD_DIM = 16, 256
_HEAD_DIM_STEP = 8  # 16 bytes of two-byte numbers: what a thread loads at once
_MAX_GROUP = 64
_MIN_CAPABILITY = (8, 0)


def supports(head_dim: int, dtype: torch.dtype, group: int, device: torch.device) -> str | None:
    """Return why the kernels cannot serve such a model on such a device, or None if they can.

    `dtype`: that of the KV cache; `group`: query heads that share a key/value head.
    """
    if dtype not in _DTYPES:
        return f"dtype {str(dtype).removeprefix('torch.')} is not one of bfloat16, float16 and float32"
    if head_dim % _HEAD_DIM_STEP or not _MIN_HEAD_DIM <= head_dim <= _MAX_HEAD_DIM:
        span = f"from {_MIN_HEAD_DIM} to {_MAX_HEAD_DIM}"
        return f"head_dim {head_dim} is not a multiple of {_HEAD_DIM_STEP} {span}"
    if group > _MAX_GROUP:
        return f"{group} query heads share a key/value head, {_MAX_GROUP} may"
    if device.type != "cuda":
        return None if IS_INTERPRETED else f"device {device.type} is not a GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability < _MIN_CAPABILITY:
        found, least = (".".join(map(str, version)) for version in (capability, _MIN_CAPABILITY))
        return f"the GPU has compute capability {found}, the kernels need {least}"
    return None


class TritonAttention:
    """Paged attention whose launches depend on shapes alone."""

    name = "triton"
    is_capturable = True

    def __init__(self, window: int = 0) -> None:
        """`window`: tokens that each token sees, itself included; 0 for all."""
        self._decode_options = DecodeOptions(window=window)
        self._prefill_options = PrefillOptions(window=window)

    def plan(self, inputs: StepInputs, batch: ForwardBatch) -> None:  # noqa: ARG002 - the interface has them
        """Return nothing: the kernels find their way by the batch's tensors."""
        return

    def attend(
        self,
        query: Tensor,
        new: tuple[Tensor, Tensor],  # noqa: ARG002 - the interface has it; the cache holds the same
        cache: tuple[Tensor, Tensor],
        batch: ForwardBatch,
    ) -> Tensor:
        """Return (tokens, heads * head_dim) for query (tokens, heads, head_dim)."""
        _, num_heads, head_dim = query.shape
        if query.stride()[1:] != (head_dim, 1):
            query = query.contiguous()  # (tokens, heads, head_dim)
        output = query.new_empty((len(query), num_heads, head_dim))  # (tokens, heads, head_dim)
        if batch.num_decodes:
            paged_decode(query, cache, batch, output, self._decode_options)
        if batch.num_decodes < len(batch.context_lens):
            paged_prefill(query, cache, batch, output, self._prefill_options)
        return output.flatten(1)  # (tokens, heads * head_dim)
