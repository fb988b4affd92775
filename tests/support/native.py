"""Tiny random models for the native step, made from arrays, and the same model for the torch oracle."""

from dataclasses import dataclass, field

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from engine.kernels.cpu.library import (
    Kind,
    Linear,
    NativeModel,
    NativeSizes,
    StepBatch,
    Storage,
    StoredTensor,
    Vector,
    Want,
)
from engine.model.config import ModelConfig, RopeScaling
from engine.model.decoder import Decoder, DecoderWeights, LayerWeights
from engine.model.layers import Linear as TorchLinear
from engine.model.rotary import rotary_table
from tests.support.kernels import open_library

Floats = NDArray[np.float32]

_KINDS = {"q4": Kind.Q4, "int8": Kind.INT8, "bf16": Kind.BF16, "fp32": Kind.F32}
_LAYER_LINEARS = {
    Linear.Q: ("q",),
    Linear.K: ("k",),
    Linear.V: ("v",),
    Linear.O: ("o",),
    Linear.GATE_UP: ("gate", "up"),
    Linear.DOWN: ("down",),
}
_LAYER_VECTORS = {
    Vector.ATTN_NORM: "attn_norm",
    Vector.MLP_NORM: "mlp_norm",
    Vector.Q_NORM: "q_norm",
    Vector.K_NORM: "k_norm",
    Vector.Q_BIAS: "q_bias",
    Vector.K_BIAS: "k_bias",
    Vector.V_BIAS: "v_bias",
    Vector.O_BIAS: "o_bias",
}


@dataclass(frozen=True)
class Shape:
    """Sizes of a tiny model; odd ones are welcome, but four-bit weights need inputs in multiples of 32."""

    hidden_size: int = 64
    intermediate_size: int = 96
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    vocab_size: int = 100
    is_tied: bool = True
    has_biases: bool = False
    has_head_norms: bool = False


@dataclass
class TinyModel:
    """A random model. `stored` is Q4_0, Q4_1, Q8_0 or F32: how its weights came from a file."""

    shape: Shape
    stored: str = "F32"
    seed: int = 0
    num_positions: int = 1100
    weights: dict[str, Floats] = field(default_factory=dict)
    raw: dict[str, NDArray[np.uint8]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Draw all weights."""
        rng, shape = np.random.default_rng(self.seed), self.shape
        query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        sizes = {
            "q": (query, shape.hidden_size), "k": (kv, shape.hidden_size), "v": (kv, shape.hidden_size),
            "o": (shape.hidden_size, query), "gate": (shape.intermediate_size, shape.hidden_size),
            "up": (shape.intermediate_size, shape.hidden_size),
            "down": (shape.hidden_size, shape.intermediate_size),
        }  # fmt: skip
        vectors = {"attn_norm": shape.hidden_size, "mlp_norm": shape.hidden_size}
        if shape.has_biases:
            vectors |= {"q_bias": query, "k_bias": kv, "v_bias": kv, "o_bias": shape.hidden_size}
        if shape.has_head_norms:
            vectors |= {"q_norm": shape.head_dim, "k_norm": shape.head_dim}
        for layer in range(shape.num_layers):
            for name, size in sizes.items():
                self._add_matrix(f"{layer}.{name}", rng, size)
            for name, length in vectors.items():
                self.weights[f"{layer}.{name}"] = _draw_vector(rng, name, length)
        self._add_matrix("head", rng, (shape.vocab_size, shape.hidden_size))
        if not shape.is_tied:
            self._add_matrix("embed", rng, (shape.vocab_size, shape.hidden_size))
        self.weights["final_norm"] = _draw_vector(rng, "norm", shape.hidden_size)

    def _add_matrix(self, name: str, rng: np.random.Generator, size: tuple[int, int]) -> None:
        scale = 1.0 if name in ("head", "embed") else 1.5 / size[1] ** 0.5
        matrix = (rng.standard_normal(size) * scale).astype(np.float32)  # size
        if self.stored != "F32":
            kind = GGMLQuantizationType[self.stored]
            self.raw[name] = np.ascontiguousarray(quantize(matrix, kind))  # (rows, bytes per row) uint8
            matrix = dequantize(self.raw[name], kind).astype(np.float32)  # size
        self.weights[name] = matrix

    @property
    def config(self) -> ModelConfig:
        """The configuration as the loader would read it."""
        shape = self.shape
        return ModelConfig(
            architecture="llama", hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size,
            num_layers=shape.num_layers, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim, vocab_size=shape.vocab_size, max_position=self.num_positions,
            rope_theta=10000.0, rope_scaling=RopeScaling(), rms_norm_eps=1e-5,
            tied_embeddings=shape.is_tied, qkv_bias=shape.has_biases, output_bias=shape.has_biases,
            qk_norm=shape.has_head_norms, eos_token_ids=frozenset(),
        )  # fmt: skip

    def make_native(self, isa: str, sizes: NativeSizes) -> NativeModel:
        """Pack the model; its KV pool is full of NaN."""
        model = NativeModel(open_library(isa), self.config, sizes)
        for layer in range(self.shape.num_layers):
            for which, names in _LAYER_LINEARS.items():
                self._set_linear(model, layer, which, [f"{layer}.{name}" for name in names])
            for vector, name in _LAYER_VECTORS.items():
                if f"{layer}.{name}" in self.weights:
                    model.set_vector(layer, vector, _as_vector(self.weights[f"{layer}.{name}"]))
        self._set_linear(model, 0, Linear.HEAD, ["head"])
        if not self.shape.is_tied:
            self._set_linear(model, 0, Linear.EMBED, ["embed"])
        model.set_vector(0, Vector.FINAL_NORM, _as_vector(self.weights["final_norm"]))
        model.set_rotary(*rotary_table(self.config, sizes.num_positions, None))
        model.finish()
        model.view_kv()[:] = 0xFF  # NaN as bfloat16 and as float32
        return model

    def _set_linear(self, model: NativeModel, layer: int, which: Linear, names: list[str]) -> None:
        kind = _KINDS[model.sizes.dtype]
        if kind == Kind.Q4 and self.stored not in ("Q4_0", "Q4_1"):
            kind = Kind.INT8
        tensors = []
        for name in names:
            rows, columns = self.weights[name].shape
            stored = self.raw.get(name, self.weights[name])
            tensors.append(StoredTensor(stored, Storage[self.stored], rows, columns))
        model.set_linear(layer, which, kind, tensors)

    def make_decoder(self) -> Decoder:
        """Return the same model in float32 torch."""
        layers = [self._make_layer(f"{layer}.") for layer in range(self.shape.num_layers)]
        head = torch.from_numpy(self.weights["head"])  # (vocab_size, hidden_size)
        weights = DecoderWeights(
            embedding=head if self.shape.is_tied else torch.from_numpy(self.weights["embed"]),
            layers=layers,
            norm=torch.from_numpy(self.weights["final_norm"]),
            head=TorchLinear(head.clone()),
        )
        with torch.inference_mode():
            return Decoder(self.config, weights, self.num_positions)

    def _make_layer(self, prefix: str) -> LayerWeights:
        def take(*names: str) -> torch.Tensor:
            return torch.cat([torch.from_numpy(self.weights[prefix + name]) for name in names])

        biased, normed = self.shape.has_biases, self.shape.has_head_norms
        return LayerWeights(
            attn_norm=take("attn_norm"),
            qkv=TorchLinear(take("q", "k", "v"), take("q_bias", "k_bias", "v_bias") if biased else None),
            output=TorchLinear(take("o"), take("o_bias") if biased else None),
            mlp_norm=take("mlp_norm"),
            gate_up=TorchLinear(take("gate", "up")),
            down=TorchLinear(take("down")),
            q_norm=take("q_norm") if normed else None,
            k_norm=take("k_norm") if normed else None,
        )


@dataclass(frozen=True)
class Share:
    """What a step computes of a sequence: tokens [start, end) of `token_ids`, KV in `table`."""

    token_ids: list[int]
    start: int
    end: int
    table: list[int]
    want: Want = Want.GREEDY


def step(model: NativeModel, shares: list[Share]) -> tuple[Floats, list[int]]:
    """Compute one step; return the logits (tokens, vocab_size) of all its tokens, and the next tokens."""
    batch = StepBatch()
    for share in shares:
        batch.token_ids.fromlist(share.token_ids[share.start : share.end])
        batch.num_computed.append(share.start)
        batch.num_scheduled.append(share.end - share.start)
        batch.tables.fromlist(share.table)
        batch.table_starts.append(len(batch.tables))
        batch.wants.append(share.want)
        batch.temperatures.append(1.0)
        batch.top_ks.append(0)
        batch.top_ps.append(1.0)
        batch.uniforms.append(0.5)
    logits = np.full((len(batch.token_ids), model.config.vocab_size), np.nan, np.float32)
    output = model.step(batch, logits, all_logits=True)
    return logits, output.token_ids


def _draw_vector(rng: np.random.Generator, name: str, length: int) -> Floats:
    low, high = (0.5, 1.5) if "norm" in name else (-0.3, 0.3)
    return rng.uniform(low, high, length).astype(np.float32)


def _as_vector(values: Floats) -> StoredTensor:
    return StoredTensor(values, Storage.F32, len(values), 1)
