"""Synthetic models: tiny random decoders made by `transformers`, written as folders and as GGUF files."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, GGUFWriter
from gguf.quants import dequantize
from tokenizers import Tokenizer
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from engine.model.check import open_model
from engine.model.decoder import Decoder
from engine.model.weights import load_weights
from tests.support.tokenizers import CHAT_TEMPLATE

VOCAB_SIZE = 320
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

_CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
_GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


@dataclass(frozen=True)
class Variant:
    """One kind of model that the decoder must get right."""

    family: str
    overrides: dict[str, Any]


VARIANTS = {
    "llama tied": Variant("llama", {"tie_word_embeddings": True}),
    "llama untied": Variant("llama", {"tie_word_embeddings": False}),
    "llama one kv head": Variant("llama", {"num_key_value_heads": 1}),
    "llama no grouping": Variant("llama", {"num_key_value_heads": 4}),
    "llama attention bias": Variant("llama", {"attention_bias": True}),
    "llama head_dim not hidden/heads": Variant("llama", {"head_dim": 24}),
    "llama linear rope": Variant("llama", {"rope_parameters": LINEAR_ROPE}),
    "llama llama3 rope": Variant("llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2 with biases": Variant("qwen2", {"tie_word_embeddings": True}),
    "qwen3 with q/k norms": Variant("qwen3", {"head_dim": 32, "tie_word_embeddings": False}),
}


def make_reference(variant: Variant, seed: int = 0) -> PreTrainedModel:
    """Return a random model in float32; biases and norms are random too, so that none can be lost."""
    config_class, model_class = _CLASSES[variant.family]
    torch.manual_seed(seed)
    model: PreTrainedModel = model_class(config_class(**{**SIZES, **variant.overrides})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.08)
    return model


def write_folder(model: PreTrainedModel, folder: Path, *, max_shard_size: str = "1GB") -> Path:
    """Write a Hugging Face folder."""
    model.save_pretrained(str(folder), max_shard_size=max_shard_size)
    return folder


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    *,
    freq_factors: Tensor | None = None,
    tokenizer: Tokenizer | None = None,
    adds_begin: bool = False,
) -> Path:
    """Write a GGUF file as llama.cpp's converter would: q and k rows of llama models interleaved.

    `tokenizer`: a byte-level one to put into the file.
    """
    config = model.config
    architecture = config.model_type
    writer = GGUFWriter(str(path), architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    if tokenizer is not None:
        _add_tokenizer(writer, tokenizer, adds_begin=adds_begin)
    tied = config.tie_word_embeddings
    for name, value in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        writer.add_tensor(gguf_name(name), _in_gguf_order(name, value, config, head_dim))
    if freq_factors is not None:
        writer.add_tensor("rope_freqs.weight", freq_factors.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: GGUFWriter, tokenizer: Tokenizer, *, adds_begin: bool) -> None:
    added = tokenizer.get_added_tokens_decoder()
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    normal, control, user_defined = 1, 3, 4
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([text for text, _ in vocab])
    writer.add_token_types(
        [(control if added[i].special else user_defined) if i in added else normal for _, i in vocab]
    )
    writer.add_token_merges([" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]])
    writer.add_add_bos_token(adds_begin)
    writer.add_chat_template(CHAT_TEMPLATE)


@cache
def read_gguf(path: Path) -> GGUFReader:
    """Return what the format's own library reads: seconds for the default model's tokens, so only once."""
    return GGUFReader(path)


def load_reference(path: Path) -> PreTrainedModel:
    """Return a GGUF file of the llama family as a float32 model of `transformers`.

    Parsed and dequantised by the format's own library, so that none of the engine's code is in it.
    """
    reader = read_gguf(path)

    def value_of(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    embedding = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    config = LlamaConfig(
        vocab_size=int(embedding.shape[1]),
        hidden_size=value_of("embedding_length"),
        intermediate_size=value_of("feed_forward_length"),
        num_hidden_layers=value_of("block_count"),
        num_attention_heads=value_of("attention.head_count"),
        num_key_value_heads=value_of("attention.head_count_kv"),
        max_position_embeddings=value_of("context_length"),
        rms_norm_eps=value_of("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value_of("rope.freq_base")},
        tie_word_embeddings=all(tensor.name != "output.weight" for tensor in reader.tensors),
    )
    with torch.device("meta"):
        model: PreTrainedModel = LlamaForCausalLM(config)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    state = {}
    for name in model.state_dict():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        tensor = stored[gguf_name(name)]
        numbers = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        state[name] = torch.from_numpy(_from_gguf_order(name, numbers, config).copy())
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    assert not any(parameter.is_meta for parameter in model.parameters())
    return model.eval()


def _from_gguf_order(name: str, array: "np.ndarray[Any, Any]", config: Any) -> "np.ndarray[Any, Any]":
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    part = name.split(".")[-2]
    if part not in heads:
        return array
    head_dim = config.hidden_size // config.num_attention_heads
    pairs = array.reshape(heads[part], head_dim // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(array.shape)


def gguf_name(name: str) -> str:
    """Return the GGUF name of a Hugging Face tensor name."""
    if name in _GGUF_TOP_NAMES:
        return _GGUF_TOP_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_GGUF_LAYER_NAMES[part]}.{kind}"


def _in_gguf_order(name: str, value: Tensor, config: Any, head_dim: int) -> "np.ndarray[Any, Any]":
    array: np.ndarray[Any, Any] = value.float().numpy()
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    part = name.split(".")[-2] if name.count(".") > 1 else ""
    if config.model_type != "llama" or part not in heads:
        return array
    pairs = array.reshape(heads[part], 2, head_dim // 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(array.shape))


def load_decoder(path: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Decoder:
    """Load a model as the engine does."""
    files = open_model(path)
    with torch.inference_mode():
        weights = load_weights(files, dtype, torch.device(device), lambda share: None)
        return Decoder(files.config, weights, files.config.max_position)
