"""Makes the arithmetic of a decoder from the name of an attention. Imports torch, and Triton where named."""

import torch

from engine.model.config import ModelConfig
from engine.model.decoder import Arithmetic
from engine.model.reference_attention import ReferenceAttention
from engine.model.shards import Alone, Group
from engine.model.varlen_attention import VarlenAttention
from engine.runner.attention_choice import TRITON, VARLEN


def make_arithmetic(
    attention: str,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    group: Group | None = None,
) -> Arithmetic:
    """Return how a decoder computes.

    `attention` is "triton", "varlen" or "reference"; `config` is that of the whole model; `group` are the
    processes that compute it together (None: this one alone). Triton's other kernels come with its attention.
    """
    group = group or Alone()
    if attention == TRITON:
        from engine.kernels.triton.attention import TritonAttention  # noqa: PLC0415 - imports Triton
        from engine.kernels.triton.ops import TritonOps  # noqa: PLC0415 - as above

        return Arithmetic(TritonAttention(), TritonOps(), group)
    if attention == VARLEN:
        return Arithmetic(VarlenAttention(), group=group)
    bytes_per_token = group.shard.config(config).kv_size * dtype.itemsize
    return Arithmetic(ReferenceAttention(device, dtype, bytes_per_token), group=group)
