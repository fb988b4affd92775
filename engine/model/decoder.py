"""The decoder of the Llama, Qwen2 and Qwen3 families on paged keys and values.

One forward computes a ragged batch: all scheduled tokens of all sequences in rows, whatever sequence or
phase they belong to. Only rows whose next token is wanted go through the output head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.attention import AttentionBatch, KVCache, paged_attention
from engine.model.config import ModelConfig
from engine.model.layers import Linear, RotaryTable, apply_rotary, gated_mlp, rms_norm


@dataclass(slots=True)
class ForwardBatch:
    """The tensors of one step.

    `input_ids` and `positions` (tokens) int64; `logits_rows` (wanted) int64, the rows whose logits are
    returned, in the order in which they are returned.
    """

    input_ids: Tensor
    positions: Tensor
    logits_rows: Tensor
    attention: AttentionBatch


@dataclass(slots=True)
class LayerWeights:
    """Weights of one layer; `qkv` and `gate_up` are stacked so that each is one product."""

    attn_norm: Tensor
    qkv: Linear
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


@dataclass(slots=True)
class DecoderWeights:
    """All weights. `embedding` (vocab_size, hidden_size); `head` is packed apart even when tied."""

    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Linear
    freq_factors: Tensor | None = None


class Decoder:
    """Weights, and the arithmetic over them."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, num_positions: int) -> None:
        """Get ready for positions [0, num_positions)."""
        self.config = config
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self._weights = weights
        self._rotary = RotaryTable(config, num_positions, self.device, weights.freq_factors)

    def make_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Allocate the KV pool of this model."""
        shape = (num_blocks, block_size, self.config.num_kv_heads, self.config.head_dim)
        return KVCache(self.config.num_layers, shape, self.dtype, self.device)

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Compute all tokens, write their KV, return logits (len(logits_rows), vocab_size)."""
        weights = self._weights
        hidden = weights.embedding.index_select(0, batch.input_ids)  # (tokens, hidden_size)
        angles = self._rotary.at(batch.positions)  # 2 * (tokens, 1, head_dim) float32
        for layer, keys, values in zip(weights.layers, cache.keys, cache.values, strict=True):
            attended = self._attend(hidden, layer, angles, (keys, values), batch.attention)
            hidden += attended  # (tokens, hidden_size)
            normed = rms_norm(hidden, layer.mlp_norm, self.config.rms_norm_eps)  # (tokens, hidden_size)
            hidden += gated_mlp(normed, layer.gate_up, layer.down)  # (tokens, hidden_size)
        wanted = hidden.index_select(0, batch.logits_rows)  # (wanted, hidden_size)
        return weights.head(rms_norm(wanted, weights.norm, self.config.rms_norm_eps))  # (wanted, vocab_size)

    def _attend(
        self,
        hidden: Tensor,
        layer: LayerWeights,
        angles: tuple[Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
        batch: AttentionBatch,
    ) -> Tensor:
        config = self.config
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        normed = rms_norm(hidden, layer.attn_norm, config.rms_norm_eps)  # (tokens, hidden_size)
        qkv = layer.qkv(normed).view(-1, num_heads + 2 * num_kv_heads, config.head_dim)
        query_key = qkv[:, : num_heads + num_kv_heads]  # (tokens, heads + kv_heads, head_dim)
        value = qkv[:, num_heads + num_kv_heads :]  # (tokens, kv_heads, head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            query = rms_norm(query_key[:, :num_heads], layer.q_norm, config.rms_norm_eps)
            key = rms_norm(query_key[:, num_heads:], layer.k_norm, config.rms_norm_eps)
            query_key = torch.cat((query, key), 1)  # (tokens, heads + kv_heads, head_dim)
        query_key = apply_rotary(query_key, *angles)  # (tokens, heads + kv_heads, head_dim)
        query, key = query_key[:, :num_heads], query_key[:, num_heads:]
        attended = paged_attention(query, key, value, cache, batch)  # (tokens, heads * head_dim)
        return layer.output(attended)  # (tokens, hidden_size)
