"""Attention from the tensors of a batch alone, as a captured graph needs it: simple, slow, in plain torch."""

import torch
from torch import Tensor

from engine.model.step import ForwardBatch, StepInputs


class PaddedAttention:
    """An `AttentionBackend` that gathers each sequence's whole block table."""

    name = "padded"
    is_capturable = True

    def plan(self, inputs: StepInputs, batch: ForwardBatch) -> None:
        return None

    def attend(
        self,
        query: Tensor,
        new: tuple[Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
        batch: ForwardBatch,
    ) -> Tensor:
        keys, values = cache
        num_heads, head_dim = query.shape[1:]
        repeat = num_heads // keys.shape[2]
        output = torch.zeros_like(query)  # (tokens, heads, head_dim)
        starts = batch.query_starts.tolist()
        for index, context in enumerate(batch.context_lens.tolist()):
            start, end = starts[index], starts[index + 1]
            if not context:
                continue
            blocks = batch.block_tables[index, : -(-context // keys.shape[1])]
            key = keys[blocks].flatten(0, 1)[:context].float().repeat_interleave(repeat, 1)
            value = values[blocks].flatten(0, 1)[:context].float().repeat_interleave(repeat, 1)
            scores = torch.einsum("qhd,khd->hqk", query[start:end].float(), key) / head_dim**0.5
            last = torch.arange(context - (end - start), context)
            visible = torch.arange(context) <= last[:, None]  # (tokens, context)
            weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
            output[start:end] = torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype)
        return output.flatten(1)
