"""Attention over paged keys and values through torch's own FlashAttention, `torch.nn.attention.varlen`.

Where torch takes block tables (`engine.runner.attention_choice` says when) it needs pages of 256 tokens and
bf16 or fp16; nothing is copied or gathered. Importing this imports no CUDA code.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.model.step import ForwardBatch, StepInputs

_FULL, _CAUSAL = (-1, -1), (-1, 0)
"""Windows as `varlen_attn` writes them. Causal: a sequence's last query sees its last key."""

_NUM_SPLITS = 1
"""FlashAttention 2 of torch 2.13 leaves out rows when it splits paged keys (pytorch/pytorch issue 194167).
Without splits a sequence's result does not depend on the others of its batch, either."""

VarlenFunction = Callable[..., Any]


def load_varlen_attn() -> VarlenFunction:
    """Return torch's function; raises `ImportError` where torch has none."""
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - takes time, and older torch lacks it

    return varlen_attn


class VarlenAttention:
    """The `AttentionBackend` of torch's `varlen_attn`."""

    name = "varlen"
    is_capturable = False
    """The host would wait for plain torch's other operations, which look for padding, while capturing."""

    def __init__(self, varlen_attn: VarlenFunction | None = None) -> None:
        """Use torch's function, unless another one of its signature is given."""
        self._varlen_attn = varlen_attn or load_varlen_attn()

    def plan(self, inputs: StepInputs, batch: ForwardBatch) -> Tensor:  # noqa: ARG002 - the interface has it
        """Return where each context would begin if all lay in a row: (sequences + 1) int32."""
        return _list_starts(batch.context_lens)

    def attend(
        self,
        query: Tensor,
        new: tuple[Tensor, Tensor],  # noqa: ARG002 - they are in the cache
        cache: tuple[Tensor, Tensor],
        batch: ForwardBatch,
    ) -> Tensor:
        """Return (tokens, heads * head_dim) for query (tokens, heads, head_dim)."""
        if batch.plan is None:  # while a graph is captured: computed by its first layer
            batch.plan = _list_starts(batch.context_lens)
        assert isinstance(batch.plan, Tensor)
        # One query of a sequence is its last token, which sees everything; without a window FlashAttention
        # packs the query heads that share a key.
        window = _FULL if batch.max_query_len == 1 else _CAUSAL
        attended: Tensor = self._varlen_attn(
            query,
            cache[0],
            cache[1],
            batch.query_starts,
            batch.plan,
            batch.max_query_len,
            batch.max_context_len,
            window_size=window,
            enable_gqa=True,
            seqused_k=batch.context_lens,
            block_table=batch.block_tables,
            num_splits=_NUM_SPLITS,
        )  # (tokens, heads, head_dim)
        return attended.flatten(1)  # (tokens, heads * head_dim)


def _list_starts(context_lens: Tensor) -> Tensor:
    starts = torch.zeros(
        len(context_lens) + 1, dtype=torch.int32, device=context_lens.device
    )  # (sequences + 1)
    torch.cumsum(context_lens, 0, dtype=torch.int32, out=starts[1:])
    return starts
