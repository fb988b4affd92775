"""The headers of a model that has no weights, for what is computed from headers alone."""

from pathlib import Path

from engine.model.check import ModelFiles, ModelInfo
from engine.model.config import config_from_hf
from engine.model.tensor_info import TensorInfo

HIDDEN, INNER, VOCAB, LAYERS = 64, 128, 320, 3
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
SHAPES = {
    "q": (HEADS * HEAD_DIM, HIDDEN),
    "k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "o": (HIDDEN, HEADS * HEAD_DIM),
    "gate": (INNER, HIDDEN),
    "up": (INNER, HIDDEN),
    "down": (HIDDEN, INNER),
}


def make_files(dtype: str = "Q4_1", **others: str) -> ModelFiles:
    """Return the headers of a model; `others`: the storage types of some weights by name."""
    config = config_from_hf(
        {
            "model_type": "llama",
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "hidden_size": HIDDEN,
            "vocab_size": VOCAB,
            "intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
        },
        {},
    )
    weights = {"embed.weight": (VOCAB, HIDDEN)}
    weights |= {
        f"layers.{layer}.{name}.weight": shape for layer in range(LAYERS) for name, shape in SHAPES.items()
    }
    tensors = {
        name: TensorInfo(name, shape, others.get(name.split(".")[-2], dtype), Path(), 0, 0)
        for name, shape in weights.items()
    }
    info = ModelInfo(Path(), "tiny", "gguf", "llama", dtype, 0, 0, LAYERS, VOCAB, 256)
    return ModelFiles(info, config, tensors, None)
