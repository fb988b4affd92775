"""Which tensor of a file is which weight: every one is used, knowingly ignored or refused by name."""

import re
from dataclasses import dataclass

from engine.errors import ModelError
from engine.model.config import ModelConfig
from engine.model.tensor_info import NOT_LOADABLE, QUANT_GEOMETRY, TensorInfo, show

FREQ_FACTORS = "rope.freq_factors"
"""Weight name of the divisors of the rotary frequencies that some GGUF files carry (Llama 3.1)."""

_GGUF_TOP = {
    "embed.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "head.weight": "output.weight",
    FREQ_FACTORS: "rope_freqs.weight",
}
_GGUF_LAYER = {
    "attn_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
_HF_TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_HF_LAYER = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}

# Rotary tables that older exports carried along; they follow from the configuration.
_IGNORED = re.compile(
    r"(model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|blk\.\d+\.attn_rot_embd\.weight)"
)


@dataclass(frozen=True, slots=True)
class _Expected:
    shape: tuple[int, ...]
    file_name: str
    optional: bool = False


def match_tensors(
    config: ModelConfig, tensors: dict[str, TensorInfo], *, is_gguf: bool
) -> dict[str, TensorInfo]:
    """Return the file's tensors by weight name ("layers.0.q.weight", "embed.weight", ...).

    Raises `ModelError` naming the first tensor that is missing, of the wrong shape, or unknown.
    """
    expected = _expected(config, is_gguf=is_gguf)
    matched = {}
    for name, want in expected.items():
        tensor = tensors.get(want.file_name)
        if tensor is None and not want.optional:
            raise ModelError(f"tensor {show(want.file_name)} is missing from the model file.")
        if tensor is None:
            continue
        if tensor.shape != want.shape:
            raise ModelError(
                f"{tensor.path.name}: tensor {show(want.file_name)} has shape {list(tensor.shape)}, "
                f"expected {list(want.shape)}."
            )
        if tensor.dtype not in QUANT_GEOMETRY or tensor.dtype in NOT_LOADABLE:
            raise ModelError(
                f"{tensor.path.name}: tensor {show(want.file_name)}: weights of type {tensor.dtype} are not "
                "supported."
            )
        matched[name] = tensor
    known = {want.file_name for want in expected.values()}
    if config.tied_embeddings and not is_gguf:
        known.add(_HF_TOP["head.weight"])  # a second copy of the embedding
    for name, tensor in tensors.items():
        if name not in known and not _IGNORED.fullmatch(name):
            raise ModelError(
                f"{tensor.path.name}: tensor {show(name)} is unknown for architecture "
                f"{config.architecture}; running without it would give wrong answers."
            )
    return matched


def _expected(config: ModelConfig, *, is_gguf: bool) -> dict[str, _Expected]:
    top = _GGUF_TOP if is_gguf else _HF_TOP
    expected = {
        "embed.weight": _Expected((config.vocab_size, config.hidden_size), top["embed.weight"]),
        "norm.weight": _Expected((config.hidden_size,), top["norm.weight"]),
    }
    if not config.tied_embeddings:
        expected["head.weight"] = _Expected((config.vocab_size, config.hidden_size), top["head.weight"])
    if is_gguf:
        expected[FREQ_FACTORS] = _Expected((config.head_dim // 2,), top[FREQ_FACTORS], optional=True)
    layer_shapes = _layer_shapes(config)
    for layer in range(config.num_layers):
        for name, shape in layer_shapes.items():
            part, kind = name.split(".")
            stem = (
                f"blk.{layer}.{_GGUF_LAYER[part]}" if is_gguf else f"model.layers.{layer}.{_HF_LAYER[part]}"
            )
            expected[f"layers.{layer}.{name}"] = _Expected(shape, f"{stem}.{kind}")
    return expected


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, mlp = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.kv_size
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (hidden,),
        "q.weight": (query, hidden),
        "k.weight": (key, hidden),
        "v.weight": (key, hidden),
        "o.weight": (hidden, query),
        "mlp_norm.weight": (hidden,),
        "gate.weight": (mlp, hidden),
        "up.weight": (mlp, hidden),
        "down.weight": (hidden, mlp),
    }
    if config.qkv_bias:
        shapes |= {"q.bias": (query,), "k.bias": (key,), "v.bias": (key,)}
    if config.output_bias:
        shapes |= {"o.bias": (hidden,)}
    if config.qk_norm:
        shapes |= {"q_norm.weight": (config.head_dim,), "k_norm.weight": (config.head_dim,)}
    return shapes
