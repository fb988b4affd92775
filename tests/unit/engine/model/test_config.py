"""Model configurations: what the two sources mean, and what is refused by name."""

from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelError
from engine.model.config import ModelConfig, RopeScaling, config_from_gguf, config_from_hf
from engine.model.gguf import GGUFFile
from engine.model.tensor_info import TensorInfo

HF: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "eos_token_id": 2,
}
GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 256,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 5000.0,
    "tokenizer.ggml.eos_token_id": 2,
}


def hf_config(generation: dict[str, Any] | None = None, **overrides: Any) -> ModelConfig:
    return config_from_hf({**HF, **overrides}, generation or {})


def gguf_config(tensors: tuple[str, ...] = (), **overrides: Any) -> ModelConfig:
    metadata = {**GGUF, **{name.replace("__", "."): value for name, value in overrides.items()}}
    names = ("token_embd.weight", *tensors)
    path = Path("model.gguf")
    places = {name: TensorInfo(name, (320, 64), "F32", path, 0, 0) for name in names}
    return config_from_gguf(GGUFFile(path, metadata, places, 0))


def test_both_sources_of_one_model_agree() -> None:
    assert hf_config(tie_word_embeddings=True) == gguf_config()


def test_the_head_size_may_differ_from_hidden_size_over_heads() -> None:
    assert hf_config().head_dim == 16
    assert hf_config(head_dim=24).head_dim == 24
    assert gguf_config(llama__attention__key_length=24, llama__attention__value_length=24).head_dim == 24
    assert hf_config(model_type="qwen3").head_dim == 128  # its own default


def test_embeddings_are_tied_in_a_gguf_file_without_an_output_tensor() -> None:
    assert gguf_config().tied_embeddings
    assert not gguf_config(("output.weight",)).tied_embeddings
    assert not hf_config().tied_embeddings


def test_families_differ_in_biases_and_norms() -> None:
    llama, qwen2, qwen3 = (hf_config(model_type=name) for name in ("llama", "qwen2", "qwen3"))
    assert (llama.qkv_bias, llama.output_bias, llama.qk_norm) == (False, False, False)
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.qk_norm) == (False, False, True)
    assert hf_config(attention_bias=True).output_bias
    assert gguf_config(("blk.0.attn_q.bias",)).qkv_bias


def test_mistral_is_a_llama_up_to_its_window() -> None:
    config = hf_config(model_type="mistral", sliding_window=100)
    assert (config.architecture, config.max_position) == ("llama", 100)
    assert gguf_config(llama__attention__sliding_window=90).max_position == 90


def test_a_window_that_is_switched_off_does_not_count() -> None:
    assert hf_config(model_type="qwen2", sliding_window=64, use_sliding_window=False).max_position == 256
    assert hf_config(model_type="qwen2", sliding_window=64, use_sliding_window=True).max_position == 64
    assert hf_config(model_type="mistral", sliding_window=None).max_position == 256


def test_rope_settings_are_read_in_the_old_and_the_new_spelling() -> None:
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    expected = RopeScaling("llama3", 8.0, 1.0, 4.0, 64)
    assert hf_config(rope_scaling=llama3).rope_scaling == expected
    new = hf_config(rope_theta=None, rope_parameters={**llama3, "rope_theta": 7000.0})
    assert (new.rope_scaling, new.rope_theta) == (expected, 7000.0)
    assert hf_config(rope_scaling={"type": "linear", "factor": 2}).rope_scaling == RopeScaling("linear", 2.0)
    linear = gguf_config(llama__rope__scaling__type="linear", llama__rope__scaling__factor=2.0)
    assert linear.rope_scaling == RopeScaling("linear", 2.0)
    assert gguf_config(llama__rope__scale_linear=3.0).rope_scaling == RopeScaling("linear", 3.0)


def test_end_tokens_come_from_all_places_that_name_some() -> None:
    assert hf_config({"eos_token_id": [2, 7]}, eos_token_id=3).eos_token_ids == {2, 3, 7}
    assert gguf_config(tokenizer__ggml__eot_token_id=9).eos_token_ids == {2, 9}
    assert hf_config(eos_token_id=None).eos_token_ids == frozenset()


REFUSED_HF: dict[str, tuple[dict[str, Any], str]] = {
    "unknown architecture": ({"model_type": "gpt_neox"}, "gpt_neox"),
    "architecture not text": ({"model_type": 3}, "model_type"),
    "size missing": ({"hidden_size": None}, "hidden_size"),
    "size not whole": ({"hidden_size": 64.0}, "hidden_size"),
    "size is a flag": ({"num_hidden_layers": True}, "num_hidden_layers"),
    "size negative": ({"intermediate_size": -1}, "intermediate_size"),
    "size huge": ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    "heads not divisible": ({"num_key_value_heads": 3}, "KV heads"),
    "odd head": ({"head_dim": 15}, "odd"),
    "hidden not divisible": ({"num_attention_heads": 5, "num_key_value_heads": 5}, "heads"),
    "eps not finite": ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    "activation": ({"hidden_act": "gelu"}, "gelu"),
    "mlp bias": ({"mlp_bias": True}, "mlp_bias"),
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    "dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "dynamic"),
    "linear without factor": ({"rope_scaling": {"type": "linear"}}, "factor"),
    "rope not an object": ({"rope_scaling": 3}, "rope_scaling"),
    "partial rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "end token outside": ({"eos_token_id": 320}, "eos_token_id"),
}
REFUSED_GGUF: dict[str, tuple[dict[str, Any], str]] = {
    "unknown architecture": ({"general.architecture": "mamba"}, "mamba"),
    "architecture missing": ({"general.architecture": None}, "general.architecture"),
    "size missing": ({"llama.block_count": None}, "llama.block_count"),
    "unknown key": ({"llama.attention.softcap": 30.0}, "llama.attention.softcap"),
    "experts": ({"llama.expert_count": 8}, "expert_count"),
    "yarn": ({"llama.rope.scaling.type": "yarn"}, "yarn"),
    "partial rotary": ({"llama.rope.dimension_count": 8}, "rope.dimension_count"),
    "value size": ({"llama.attention.value_length": 8}, "value_length"),
    "not causal": ({"llama.attention.causal": False}, "causal"),
}


@pytest.mark.parametrize("case", REFUSED_HF)
def test_what_a_folder_cannot_ask_for_is_refused_by_name(case: str) -> None:
    overrides, named = REFUSED_HF[case]
    with pytest.raises(ModelError, match=r"config\.json") as caught:
        hf_config(**overrides)
    assert named in str(caught.value)


@pytest.mark.parametrize("case", REFUSED_GGUF)
def test_what_a_gguf_file_cannot_ask_for_is_refused_by_name(case: str) -> None:
    overrides, named = REFUSED_GGUF[case]
    with pytest.raises(ModelError, match=r"model\.gguf") as caught:
        gguf_config(**overrides)
    assert named in str(caught.value)


def test_a_gguf_file_without_an_embedding_is_refused() -> None:
    with pytest.raises(ModelError, match=r"token_embd\.weight"):
        config_from_gguf(GGUFFile(Path("model.gguf"), dict(GGUF), {}, 0))
