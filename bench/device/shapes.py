"""The models that are measured: real shapes with random weights, also as transformers takes them.

Every number comes from one seeded generator on one device, so that two processes that ask for the same shape
there compute with the same weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from engine.model.config import ModelConfig, RopeScaling
from engine.model.decoder import DecoderWeights, LayerWeights
from engine.model.layers import Linear

Tensors: TypeAlias = dict[str, Tensor]
"""Weights by their names in a Hugging Face model."""

_DEVIATION = 0.02
"""Of the weights, as models of these families are initialised."""

QWEN3_06B = ModelConfig(
    architecture="qwen3",
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151_936,
    max_position=40_960,
    rope_theta=1_000_000.0,
    rope_scaling=RopeScaling(),
    rms_norm_eps=1e-6,
    tied_embeddings=True,
    qkv_bias=False,
    output_bias=False,
    qk_norm=True,
    eos_token_ids=frozenset(),
)
LLAMA_32_1B = ModelConfig(
    architecture="llama",
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    vocab_size=128_256,
    max_position=131_072,
    rope_theta=500_000.0,
    rope_scaling=RopeScaling("llama3", 32.0, 1.0, 4.0, 8192),
    rms_norm_eps=1e-5,
    tied_embeddings=True,
    qkv_bias=False,
    output_bias=False,
    qk_norm=False,
    eos_token_ids=frozenset(),
)
SHAPES = {"Qwen3-0.6B": QWEN3_06B, "Llama-3.2-1B": LLAMA_32_1B}


def list_shapes(*, is_tiny: bool) -> dict[str, ModelConfig]:
    """Return what is measured, by name; `is_tiny`: the same families with next to nothing to compute."""
    if not is_tiny:
        return SHAPES
    return {name: _shrink(shape) for name, shape in SHAPES.items()}


def _shrink(shape: ModelConfig) -> ModelConfig:
    return replace(
        shape,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        vocab_size=320,
    )


@dataclass(frozen=True)
class Maker:
    """Where and how weights are made: with this seed, on `made_on`, for `device` in `dtype`."""

    device: torch.device
    dtype: torch.dtype
    seed: int = 0
    made_on: torch.device | None = None


def make_tensors(config: ModelConfig, maker: Maker) -> Tensors:
    """Return random weights; norms are around 1, so that none can be lost unnoticed."""
    made_on = maker.made_on or maker.device
    generator = torch.Generator(made_on).manual_seed(maker.seed)

    def make(name: str, shape: tuple[int, ...]) -> Tensor:
        numbers = torch.randn(shape, generator=generator, device=made_on)  # shape, float32
        numbers = 1 + 0.1 * numbers if "norm" in name else _DEVIATION * numbers  # shape, float32
        return numbers.to(maker.device, maker.dtype)  # shape

    return {name: make(name, shape) for name, shape in list_weights(config)}


def list_weights(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every weight, in the order in which they are made."""
    hidden, inner, query = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "self_attn.q_proj.weight", (query, hidden)
        yield prefix + "self_attn.k_proj.weight", (config.kv_size, hidden)
        yield prefix + "self_attn.v_proj.weight", (config.kv_size, hidden)
        if config.qk_norm:
            yield prefix + "self_attn.q_norm.weight", (config.head_dim,)
            yield prefix + "self_attn.k_norm.weight", (config.head_dim,)
        yield prefix + "self_attn.o_proj.weight", (hidden, query)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        yield prefix + "mlp.gate_proj.weight", (inner, hidden)
        yield prefix + "mlp.up_proj.weight", (inner, hidden)
        yield prefix + "mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not config.tied_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


def decoder_weights(config: ModelConfig, tensors: Tensors) -> DecoderWeights:
    """Return the weights as the engine's decoder takes them."""

    def layer(index: int) -> LayerWeights:
        own = {
            name.removeprefix(f"model.layers.{index}.").removesuffix(".weight"): tensor
            for name, tensor in tensors.items()
            if name.startswith(f"model.layers.{index}.")
        }
        qkv = torch.cat(
            [own[f"self_attn.{part}_proj"] for part in "qkv"]
        )  # (query_size + 2 * kv_size, hidden_size)
        gate_up = torch.cat(
            [own["mlp.gate_proj"], own["mlp.up_proj"]]
        )  # (2 * intermediate_size, hidden_size)
        return LayerWeights(
            attn_norm=own["input_layernorm"],
            qkv=Linear(qkv),
            output=Linear(own["self_attn.o_proj"]),
            mlp_norm=own["post_attention_layernorm"],
            gate_up=Linear(gate_up),
            down=Linear(own["mlp.down_proj"]),
            q_norm=own.get("self_attn.q_norm"),
            k_norm=own.get("self_attn.k_norm"),
        )

    embedding = tensors["model.embed_tokens.weight"]  # (vocab_size, hidden_size)
    return DecoderWeights(
        embedding=embedding,
        layers=[layer(index) for index in range(config.num_layers)],
        norm=tensors["model.norm.weight"],
        head=Linear(embedding if config.tied_embeddings else tensors["lm_head.weight"]),
    )


def transformers_model(config: ModelConfig, tensors: Tensors, attention: str) -> Any:
    """Return the same model of transformers, which computes attention in the way of that name."""
    import transformers  # noqa: PLC0415 - takes seconds, and a part that needs none must do without

    scaling = config.rope_scaling
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if scaling.kind == "llama3":
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }
    sizes = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tied_embeddings,
    }
    family = {"qwen3": transformers.Qwen3Config, "llama": transformers.LlamaConfig}[config.architecture]
    made = family(**sizes, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    some = next(iter(tensors.values()))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation=attention)
    model = model.to(some.dtype)
    missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"transformers has other weights: lacks {missing}, does not know {unexpected}")
    model.tie_weights()
    inner = model.model
    inner.rotary_emb = type(inner.rotary_emb)(made).to(some.device)  # its tables are no weights
    return model.eval()
