"""A checked model file to a `Decoder`: numbers to tensors, stacked and packed, with progress.

A share of a model is cut here. What is cut by rows is read by rows, since those lie together in the file;
what is cut by columns is read whole and cut as numbers, since blocks of quantised numbers run along the rows.
"""

from dataclasses import replace

import torch
from torch import Tensor

from engine.model.check import ModelFiles
from engine.model.config import ModelConfig
from engine.model.decoder import DecoderWeights, LayerWeights
from engine.model.dequantize import read_float32
from engine.model.layers import Linear
from engine.model.shards import Cut, Shard
from engine.model.tensor_info import TensorInfo
from engine.model.tensor_names import FREQ_FACTORS
from engine.model.weight_reader import Report, WeightReader


def load_weights(
    files: ModelFiles,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Report,
    shard: Shard | None = None,
) -> DecoderWeights:
    """Read all weights of a model, or those of a share. Raises `ModelError` for what cannot be read."""
    return _Loader(WeightReader(files, on_progress), files.config, dtype, device, shard or Shard()).load()


class _Loader:
    def __init__(
        self,
        reader: WeightReader,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard,
    ) -> None:
        self.reader = reader
        self.config = config
        self.share = shard.config(config)
        self.shard = shard
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
                self.take_rotated(prefix + "q.bias", self.share.num_heads),
                self.take_rotated(prefix + "k.bias", self.share.num_kv_heads),
                self.take(prefix + "v.bias"),
            ])  # (query_size + 2 * kv_size)  # fmt: skip
        qkv = torch.cat([
            self.take_rotated(prefix + "q.weight", self.share.num_heads),
            self.take_rotated(prefix + "k.weight", self.share.num_kv_heads),
            self.take(prefix + "v.weight"),
        ])  # (query_size + 2 * kv_size, hidden_size)  # fmt: skip
        gate_up = torch.cat(
            [self.take(prefix + "gate.weight"), self.take(prefix + "up.weight")]
        )  # (2 * intermediate_size, hidden_size)
        return LayerWeights(
            attn_norm=self.take(prefix + "attn_norm.weight"),
            qkv=Linear(qkv, qkv_bias),
            output=Linear(self.take(prefix + "o.weight"), self.take_once(prefix + "o.bias")),
            mlp_norm=self.take(prefix + "mlp_norm.weight"),
            gate_up=Linear(gate_up),
            down=Linear(self.take(prefix + "down.weight")),
            q_norm=self.take_optional(prefix + "q_norm.weight"),
            k_norm=self.take_optional(prefix + "k_norm.weight"),
        )

    def take(self, name: str) -> Tensor:
        tensor, mapped = self.reader.locate(name)
        cut = self.shard.cut_weight(name, self.config)
        if cut is not None and cut.dim == 0:
            tensor = _rows_of(tensor, cut)
        numbers = read_float32(tensor, mapped)  # the weight's shape, or that of its rows; float32
        if cut is not None and cut.dim == 1:
            # Contiguous: a view would keep all columns in memory.
            numbers = numbers[:, cut.start : cut.stop].contiguous()  # (rows, columns of the share) float32
        numbers = numbers.to(self.device, self.dtype)  # the share's shape
        self.reader.count(name)
        return numbers

    def take_optional(self, name: str) -> Tensor | None:
        return self.take(name) if name in self.reader else None

    def take_once(self, name: str) -> Tensor | None:
        """Return what only one share may add to a sum over all."""
        return self.take_optional(name) if self.shard.rank == 0 else None

    def take_rotated(self, name: str, num_heads: int) -> Tensor:
        """Return q or k rows with rotary pairs at (i, i + head_dim / 2), whatever the file's order."""
        rows = self.take(name)  # (heads * head_dim[, hidden_size])
        if not self.reader.is_interleaved:
            return rows
        pairs = rows.view(num_heads, self.config.head_dim // 2, 2, -1)  # (heads, head_dim / 2, 2, columns)
        return pairs.transpose(1, 2).reshape(rows.shape)  # rows' shape


def _rows_of(tensor: TensorInfo, cut: Cut) -> TensorInfo:
    """Return where the rows [start, stop) of a tensor lie; quantised ones are whole blocks each."""
    row_bytes, rest = divmod(tensor.num_bytes, tensor.shape[0])
    assert rest == 0, "a row ends within a block"
    num_rows = cut.stop - cut.start
    return replace(
        tensor,
        shape=(num_rows, *tensor.shape[1:]),
        offset=tensor.offset + cut.start * row_bytes,
        num_bytes=num_rows * row_bytes,
    )
