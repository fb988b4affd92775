"""A checked model file to a `Decoder`: numbers to tensors, stacked and packed, with progress."""

import torch
from torch import Tensor

from engine.model.check import ModelFiles
from engine.model.decoder import DecoderWeights, LayerWeights
from engine.model.dequantize import read_float32
from engine.model.layers import Linear
from engine.model.tensor_names import FREQ_FACTORS
from engine.model.weight_reader import Report, WeightReader


def load_weights(
    files: ModelFiles, dtype: torch.dtype, device: torch.device, on_progress: Report
) -> DecoderWeights:
    """Read all weights of a model. Raises `ModelError` for a tensor that cannot be read."""
    return _Loader(files, dtype, device, on_progress).load()


class _Loader:
    def __init__(
        self, files: ModelFiles, dtype: torch.dtype, device: torch.device, on_progress: Report
    ) -> None:
        self.reader = WeightReader(files, on_progress)
        self.config = files.config
        self.dtype = dtype
        self.device = device

    def load(self) -> DecoderWeights:
        embedding = self.take("embed.weight")  # (vocab_size, hidden_size)
        head = embedding if self.config.tied_embeddings else self.take("head.weight")
        return DecoderWeights(
            embedding=embedding,
            head=Linear(head),
            norm=self.take("norm.weight"),
            layers=[self.load_layer(f"layers.{index}.") for index in range(self.config.num_layers)],
            freq_factors=self.take_optional(FREQ_FACTORS),
        )

    def load_layer(self, prefix: str) -> LayerWeights:
        qkv_bias = None
        if self.config.qkv_bias:
            qkv_bias = torch.cat([
                self.take_rotated(prefix + "q.bias", self.config.num_heads),
                self.take_rotated(prefix + "k.bias", self.config.num_kv_heads),
                self.take(prefix + "v.bias"),
            ])  # (query_size + 2 * kv_size)  # fmt: skip
        qkv = torch.cat([
            self.take_rotated(prefix + "q.weight", self.config.num_heads),
            self.take_rotated(prefix + "k.weight", self.config.num_kv_heads),
            self.take(prefix + "v.weight"),
        ])  # (query_size + 2 * kv_size, hidden_size)  # fmt: skip
        gate_up = torch.cat(
            [self.take(prefix + "gate.weight"), self.take(prefix + "up.weight")]
        )  # (2 * intermediate_size, hidden_size)
        return LayerWeights(
            attn_norm=self.take(prefix + "attn_norm.weight"),
            qkv=Linear(qkv, qkv_bias),
            output=Linear(self.take(prefix + "o.weight"), self.take_optional(prefix + "o.bias")),
            mlp_norm=self.take(prefix + "mlp_norm.weight"),
            gate_up=Linear(gate_up),
            down=Linear(self.take(prefix + "down.weight")),
            q_norm=self.take_optional(prefix + "q_norm.weight"),
            k_norm=self.take_optional(prefix + "k_norm.weight"),
        )

    def take(self, name: str) -> Tensor:
        numbers = read_float32(*self.reader.locate(name)).to(self.device, self.dtype)  # the weight's shape
        self.reader.count(name)
        return numbers

    def take_optional(self, name: str) -> Tensor | None:
        return self.take(name) if name in self.reader else None

    def take_rotated(self, name: str, num_heads: int) -> Tensor:
        """Return q or k rows with rotary pairs at (i, i + head_dim / 2), whatever the file's order."""
        rows = self.take(name)  # (heads * head_dim[, hidden_size])
        if not self.reader.is_interleaved:
            return rows
        pairs = rows.view(num_heads, self.config.head_dim // 2, 2, -1)  # (heads, head_dim / 2, 2, columns)
        return pairs.transpose(1, 2).reshape(rows.shape)  # rows' shape
