"""What a model is: sizes and constants, from GGUF metadata or a Hugging Face `config.json`. No torch.

Three decoder families are known: Llama (SmolLM2, TinyLlama, Mistral, ...), Qwen2 (biases on q, k, v)
and Qwen3 (norms on q and k). Whatever would change the arithmetic in a way that is not implemented is
refused by name: a model that runs wrong looks fluent.
"""

import math
from dataclasses import dataclass
from typing import Any

from engine.errors import ModelError
from engine.model.gguf import GGUFArray, GGUFFile
from engine.model.tensor_info import show

MAX_LAYERS = 1024
MAX_SIZE = 1 << 20
MAX_POSITIONS = 1 << 24

_FAMILIES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched.

    `kind` is "none", "linear" (all divided by `factor`) or "llama3" (low frequencies divided by
    `factor`, high ones kept, smooth between; Llama 3.1).
    """

    kind: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and constants of a decoder. `head_dim` need not be hidden_size / num_heads."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rope_theta: float
    rope_scaling: RopeScaling
    rms_norm_eps: float
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    eos_token_ids: frozenset[int]

    @property
    def kv_size(self) -> int:
        """Numbers in one token's keys (or values) of one layer."""
        return self.num_kv_heads * self.head_dim

    def kv_bytes_per_token(self, bytes_per_number: int) -> int:
        """Bytes of keys and values of one token over all layers."""
        return 2 * self.num_layers * self.kv_size * bytes_per_number


class _Source:
    """Typed access to untrusted settings; errors name the file and the key."""

    def __init__(self, file_name: str, values: dict[str, Any]) -> None:
        self.file_name = file_name
        self.values = values

    def error(self, key: str, what: str) -> ModelError:
        return ModelError(f"{self.file_name}: {key}: {what}.")

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def size(self, key: str, default: int | None = None, limit: int = MAX_SIZE) -> int:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "missing")
        if type(value) is not int or not 1 <= value <= limit:
            raise self.error(key, f"{show(str(value))} is not an integer of 1 to {limit}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "missing")
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self.error(key, f"{show(str(value))} is not a positive number")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.error(key, f"{show(str(value))} is not true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.values.get(key)
        if value is None:
            value = default
        if not isinstance(value, str):
            raise self.error(key, "missing" if value is None else "is not a string")
        return value

    def token_ids(self, key: str, vocab_size: int) -> list[int]:
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token_id in ids:
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                raise self.error(key, f"{show(str(token_id))} is not an id of 0 to {vocab_size - 1}")
        return ids


# ---- GGUF ---------------------------------------------------------------------------------------

_IGNORED_GGUF_KEYS = frozenset({
    "vocab_size",  # the embedding's rows count
    "attention.causal",
    "rope.scaling.original_context_length",  # linear scaling needs no original length
    "rope.scaling.finetuned",
    "attention.layer_norm_epsilon",  # for norms that these families do not have
    "tensor_data_layout",
    "expert_count",  # checked to be 0 below
    "expert_used_count",
})  # fmt: skip
_USED_GGUF_KEYS = frozenset({
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "attention.sliding_window", "rope.freq_base", "rope.dimension_count",
    "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear",
})  # fmt: skip


def config_from_gguf(gguf: GGUFFile) -> ModelConfig:
    """Return the model's configuration; raises `ModelError` for what is not supported."""
    name = gguf.path.name
    architecture = _Source(name, dict(gguf.metadata)).text("general.architecture")
    family = _family(name, architecture)
    prefix = architecture + "."
    source = _Source(name, {key: value for key, value in gguf.metadata.items() if key.startswith(prefix)})
    _check_gguf_keys(source, prefix)
    heads = source.size(prefix + "attention.head_count")
    hidden = source.size(prefix + "embedding_length")
    head_dim = source.size(prefix + "attention.key_length", _head_dim(source, hidden, heads, prefix))
    for key in ("attention.value_length", "rope.dimension_count"):
        if source.size(prefix + key, head_dim) != head_dim:
            raise source.error(prefix + key, f"only {head_dim}, the size of a head, is supported")
    vocab_size = _embedding_rows(gguf)
    tokens = _Source(name, dict(gguf.metadata))
    eos = [
        token_id
        for key in ("eos", "eot", "eom")
        for token_id in tokens.token_ids(f"tokenizer.ggml.{key}_token_id", vocab_size)
    ]
    config = ModelConfig(
        architecture=family,
        hidden_size=hidden,
        intermediate_size=source.size(prefix + "feed_forward_length"),
        num_layers=source.size(prefix + "block_count", limit=MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=source.size(prefix + "attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_position=_window(
            source.size(prefix + "context_length", limit=MAX_POSITIONS),
            source.values.get(prefix + "attention.sliding_window"),
        ),
        rope_theta=source.number(prefix + "rope.freq_base", 10000.0),
        rope_scaling=_gguf_rope_scaling(source, prefix),
        rms_norm_eps=source.number(prefix + "attention.layer_norm_rms_epsilon"),
        tied_embeddings="output.weight" not in gguf.tensors,
        qkv_bias="blk.0.attn_q.bias" in gguf.tensors,
        output_bias="blk.0.attn_output.bias" in gguf.tensors,
        qk_norm=family == "qwen3",
        eos_token_ids=frozenset(eos),
    )
    return _checked(source, config)


def _family(file_name: str, architecture: str) -> str:
    if architecture not in _FAMILIES:
        raise ModelError(
            f"{file_name}: architecture {show(architecture)} is not supported "
            f"(supported: {', '.join(sorted(_FAMILIES))})."
        )
    return _FAMILIES[architecture]


def _check_gguf_keys(source: _Source, prefix: str) -> None:
    for key, value in source.values.items():
        name = key.removeprefix(prefix)
        if name not in _USED_GGUF_KEYS | _IGNORED_GGUF_KEYS:
            raise source.error(show(key), "this setting of the architecture is not supported")
        if isinstance(value, GGUFArray):
            raise source.error(show(key), "a value per layer is not supported")
    if source.values.get(prefix + "expert_count", 0) != 0:
        raise source.error(prefix + "expert_count", "mixtures of experts are not supported")
    if source.values.get(prefix + "attention.causal", True) is not True:
        raise source.error(prefix + "attention.causal", "only causal models are supported")


def _embedding_rows(gguf: GGUFFile) -> int:
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{gguf.path.name}: tensor 'token_embd.weight' is missing.")
    return embedding.shape[0]


def _gguf_rope_scaling(source: _Source, prefix: str) -> RopeScaling:
    key = prefix + "rope.scaling.type"
    kind = source.text(key, "none")
    if kind == "none" and source.has(prefix + "rope.scale_linear"):
        return RopeScaling("linear", source.number(prefix + "rope.scale_linear"))
    if kind == "none":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling("linear", source.number(prefix + "rope.scaling.factor"))
    raise source.error(key, f"rope scaling {show(kind)} is not supported (none and linear are)")


# ---- Hugging Face -------------------------------------------------------------------------------


def config_from_hf(
    values: dict[str, Any], generation: dict[str, Any], file_name: str = "config.json"
) -> ModelConfig:
    """Return the configuration in a `config.json`, end tokens also from `generation_config.json`.

    All keys that these families' arithmetic reads are used or checked; others are not looked at, as
    in the reference implementation. Raises `ModelError` for what is not supported.
    """
    source = _Source(file_name, values)
    family = _family(file_name, source.text("model_type"))
    _check_hf_values(source)
    heads = source.size("num_attention_heads")
    hidden = source.size("hidden_size")
    default_head_dim = 128 if family == "qwen3" else _head_dim(source, hidden, heads, "")
    vocab_size = source.size("vocab_size", limit=MAX_POSITIONS)
    attention_bias = source.flag("attention_bias", default=False)
    eos = source.token_ids("eos_token_id", vocab_size)
    eos += _Source("generation_config.json", generation).token_ids("eos_token_id", vocab_size)
    config = ModelConfig(
        architecture=family,
        hidden_size=hidden,
        intermediate_size=source.size("intermediate_size"),
        num_layers=source.size("num_hidden_layers", limit=MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=source.size("num_key_value_heads", heads),
        head_dim=source.size("head_dim", default_head_dim),
        vocab_size=vocab_size,
        max_position=_hf_window(source, family),
        rope_theta=_hf_rope(source).number("rope_theta", 10000.0),
        rope_scaling=_hf_rope_scaling(source),
        rms_norm_eps=source.number("rms_norm_eps", 1e-6),
        tied_embeddings=source.flag("tie_word_embeddings", default=False),
        qkv_bias=True if family == "qwen2" else attention_bias,
        output_bias=False if family == "qwen2" else attention_bias,
        qk_norm=family == "qwen3",
        eos_token_ids=frozenset(eos),
    )
    return _checked(source, config)


def _check_hf_values(source: _Source) -> None:
    if source.text("hidden_act", "silu") != "silu":
        raise source.error("hidden_act", f"{show(source.text('hidden_act'))} is not supported (silu is)")
    if source.flag("mlp_bias", default=False):
        raise source.error("mlp_bias", "biases in the MLP are not supported")
    if source.has("quantization_config"):
        raise source.error("quantization_config", "quantised safetensors are not supported (GGUF is)")
    if source.number("partial_rotary_factor", 1.0) != 1.0:
        raise source.error("partial_rotary_factor", "only 1 is supported")


def _hf_window(source: _Source, family: str) -> int:
    max_position = source.size("max_position_embeddings", 2048, MAX_POSITIONS)
    # Mistral has a window whenever one is set; the Qwen families have a switch for it.
    windowed = source.flag("use_sliding_window", default=family == "llama")
    return _window(max_position, source.values.get("sliding_window") if windowed else None)


def _hf_rope(source: _Source) -> _Source:
    """Return the rope settings: one object in newer files, spread over two keys in older ones."""
    spread = {"rope_theta": source.values.get("rope_theta")}
    for key in ("rope_scaling", "rope_parameters"):
        value = source.values.get(key)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise source.error(key, "is not an object")
        spread |= {name: item for name, item in value.items() if item is not None}
    return _Source(f"{source.file_name}: rope", spread)


def _hf_rope_scaling(source: _Source) -> RopeScaling:
    rope = _hf_rope(source)
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind in ("default", "none"):
        return RopeScaling()
    if kind == "linear":
        return RopeScaling("linear", rope.number("factor"))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            rope.number("factor"),
            rope.number("low_freq_factor"),
            rope.number("high_freq_factor"),
            rope.size("original_max_position_embeddings", limit=MAX_POSITIONS),
        )
    raise rope.error("type", f"rope scaling {show(kind)} is not supported (default, linear, llama3 are)")


# ---- both ---------------------------------------------------------------------------------------


def _head_dim(source: _Source, hidden: int, heads: int, prefix: str) -> int | None:
    """Return hidden / heads where it is a whole number; else the file has to say the size."""
    known = source.has(prefix + "attention.key_length") or source.has("head_dim")
    if hidden % heads and not known:
        raise source.error("head size", f"{hidden} is not a multiple of {heads} heads")
    return hidden // heads or None


def _window(max_position: int, sliding_window: object) -> int:
    """Return the positions up to which full attention equals attention in a sliding window."""
    if type(sliding_window) is int and sliding_window > 0:
        return min(max_position, sliding_window)
    return max_position


def _checked(source: _Source, config: ModelConfig) -> ModelConfig:
    if config.num_heads % config.num_kv_heads:
        raise source.error(
            "attention heads", f"{config.num_heads} is not a multiple of {config.num_kv_heads} KV heads"
        )
    if config.head_dim % 2:
        raise source.error("head size", f"{config.head_dim} is odd; rotary positions need pairs")
    if config.max_position < 2:  # noqa: PLR2004
        raise source.error("context length", "a model of one position cannot generate")
    return config
