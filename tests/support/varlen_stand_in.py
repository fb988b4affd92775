"""Stands in for torch's `varlen_attn`: checks its arguments as FlashAttention 2 does, computes with torch."""

from typing import Any

import torch
from torch import Tensor

PAGE_TOKENS = 256


def check_tensors(tensors: dict[str, Tensor], shapes: dict[str, tuple[int, ...]]) -> None:
    """Check what `mha_varlen_fwd` (flash_api.cpp) checks of the arrays of a batch."""
    for name, shape in shapes.items():
        assert tensors[name].dtype == torch.int32, f"{name} must have dtype int32"
        assert tensors[name].shape == shape, f"{name} must have shape {shape}"
        assert tensors[name].stride(-1) == 1, f"{name} must have contiguous last dimension"


class VarlenStandIn:
    """A `varlen_attn`; `calls` has the keyword arguments and lengths of each call."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(  # noqa: PLR0917 - torch's signature
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        window_size: tuple[int, int],
        enable_gqa: bool,
        seqused_k: Tensor,
        block_table: Tensor,
        num_splits: int,
    ) -> Tensor:
        self.calls.append(
            {"max_q": max_q, "max_k": max_k, "window_size": window_size, "num_splits": num_splits}
        )
        num_seqs, (num_tokens, num_heads, head_dim) = len(seqused_k), query.shape
        num_pages, page_tokens, num_kv_heads, _ = key.shape
        assert page_tokens % PAGE_TOKENS == 0, "Paged KV cache block size must be divisible by 256"
        assert key.shape == value.shape == (num_pages, page_tokens, num_kv_heads, head_dim)
        assert {query.dtype, key.dtype, value.dtype} in ({torch.bfloat16}, {torch.float16})
        assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        assert head_dim % 8 == 0
        assert enable_gqa or num_heads == num_kv_heads
        arrays = {
            "cu_seq_q": cu_seq_q,
            "cu_seq_k": cu_seq_k,
            "seqused_k": seqused_k,
            "block_table": block_table,
        }
        shapes = {"cu_seq_q": (num_seqs + 1,), "cu_seq_k": (num_seqs + 1,), "seqused_k": (num_seqs,)}
        check_tensors(arrays, {**shapes, "block_table": (num_seqs, block_table.shape[1])})
        assert cu_seq_q[0] == 0
        assert cu_seq_q[-1] == num_tokens
        assert cu_seq_k.diff().tolist() == seqused_k.tolist()
        assert int(cu_seq_q.diff().max()) <= max_q
        assert int(seqused_k.max()) <= max_k
        output = torch.zeros_like(query)  # (tokens, heads, head_dim)
        for index, (start, end) in enumerate(zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True)):
            context = int(seqused_k[index])
            if context:
                pages = block_table[index, : -(-context // page_tokens)].long()
                cache = (key[pages].flatten(0, 1)[:context], value[pages].flatten(0, 1)[:context])
                output[start:end] = _attend(query[start:end], *cache, is_causal=window_size == (-1, 0))
        return output


def _attend(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
    """Attend in float64; the last query is at the last key (FlashAttention aligns them so)."""
    (num_queries, num_heads, head_dim), context = query.shape, len(key)
    repeat = num_heads // key.shape[1]
    wide_key, wide_value = (part.double().repeat_interleave(repeat, 1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), wide_key) / head_dim**0.5
    if is_causal:
        last = torch.arange(context - num_queries, context)
        scores = scores.masked_fill(torch.arange(context) > last[:, None], -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), wide_value).to(query.dtype)
