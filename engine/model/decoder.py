"""The decoder of the Llama, Qwen2 and Qwen3 families on paged keys and values.

One forward computes a ragged batch: all scheduled tokens of all sequences in rows, whatever sequence or
phase they belong to. Only rows whose next token is wanted go through the output head.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.model.attention import AttentionBackend, KVCache
from engine.model.config import ModelConfig
from engine.model.layer_ops import HeadNorms, HeadShape, LayerOps, TorchOps
from engine.model.layers import Linear, RotaryTable
from engine.model.reference_attention import ReferenceAttention
from engine.model.shards import Alone, Group
from engine.model.step import ForwardBatch, StepInputs, to_device


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


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How a decoder computes: by what attention, by what other kernels, together with whom."""

    attention: AttentionBackend
    ops: LayerOps = field(default_factory=TorchOps)
    group: Group = field(default_factory=Alone)


class Decoder:
    """Weights, and the arithmetic over them; in a group of processes, this one's share of both."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        num_positions: int,
        arithmetic: Arithmetic | None = None,
    ) -> None:
        """Get ready for positions [0, num_positions), in plain torch unless an arithmetic is given.

        `config` is that of the whole model, `weights` those of the group's share.
        """
        self.config = config
        self.num_positions = num_positions
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        if arithmetic is None:
            bytes_per_token = config.kv_size * self.dtype.itemsize
            arithmetic = Arithmetic(ReferenceAttention(self.device, self.dtype, bytes_per_token))
        self.arithmetic = arithmetic
        self.share = arithmetic.group.shard.config(config)
        """The sizes of this process's share."""
        self._heads = HeadShape(
            self.share.num_heads, self.share.num_kv_heads, config.head_dim, config.rms_norm_eps
        )
        self._vocab = arithmetic.group.shard.cut(config.vocab_size)
        self._weights = weights
        self._rotary = RotaryTable(config, num_positions, self.device, weights.freq_factors)

    def make_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Allocate the KV pool of this share of the model."""
        shape = (num_blocks, block_size, self.share.num_kv_heads, self.config.head_dim)
        return KVCache(self.config.num_layers, shape, self.dtype, self.device)

    def make_batch(self, inputs: StepInputs) -> ForwardBatch:
        """Return a step on the device, planned for the attention."""
        batch = to_device(inputs, self.device)
        batch.plan = self.arithmetic.attention.plan(inputs, batch)
        return batch

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Compute all tokens, write their KV, return logits (len(logits_rows), vocab_size)."""
        weights, ops, eps = self._weights, self.arithmetic.ops, self.config.rms_norm_eps
        add_up = self.arithmetic.group.add_up
        hidden = self._embed(batch.input_ids)  # (tokens, hidden_size)
        delta: Tensor | None = None  # (tokens, hidden_size): what the last product adds
        for layer, keys, values in zip(weights.layers, cache.keys, cache.values, strict=True):
            if delta is None:
                normed = ops.rms_norm(hidden, layer.attn_norm, eps)  # (tokens, hidden_size)
            else:
                normed = ops.add_rms_norm(hidden, delta, layer.attn_norm, eps)  # (tokens, hidden_size)
            delta = add_up(self._attend(normed, layer, (keys, values), batch))  # (tokens, hidden_size)
            normed = ops.add_rms_norm(hidden, delta, layer.mlp_norm, eps)  # (tokens, hidden_size)
            delta = add_up(layer.down(ops.silu_mul(layer.gate_up(normed))))  # (tokens, hidden_size)
        wanted = hidden.index_select(0, batch.logits_rows)  # (wanted, hidden_size)
        if delta is not None:
            wanted += delta.index_select(0, batch.logits_rows)  # (wanted, hidden_size)
        logits = weights.head(ops.rms_norm(wanted, weights.norm, eps))  # (wanted, share of the vocabulary)
        return self.arithmetic.group.join_logits(logits, self.config.vocab_size)

    def _embed(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings (tokens, hidden_size); other shares of the vocabulary add theirs."""
        embedding = self._weights.embedding  # (share of the vocabulary, hidden_size)
        if self.arithmetic.group.shard.size == 1:
            return embedding.index_select(0, input_ids)
        rows = input_ids - self._vocab.start  # (tokens) int32
        is_own = (rows >= 0) & (rows < len(embedding))  # (tokens) bool
        own = embedding.index_select(0, torch.where(is_own, rows, 0))  # (tokens, hidden_size)
        return self.arithmetic.group.add_up(own.masked_fill_(~is_own[:, None], 0.0))

    def _attend(
        self, normed: Tensor, layer: LayerWeights, cache: tuple[Tensor, Tensor], batch: ForwardBatch
    ) -> Tensor:
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = HeadNorms(layer.q_norm, layer.k_norm)
        query, key, value = self.arithmetic.ops.rotate_and_store(
            layer.qkv(normed), self._heads, norms, self._rotary, cache, batch
        )
        attended = self.arithmetic.attention.attend(query, (key, value), cache, batch)
        return layer.output(attended)  # (tokens, hidden_size)
