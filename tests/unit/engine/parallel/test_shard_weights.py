"""The weights of all shares together are those of the model, whatever the file's format."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from torch import Tensor

from engine.model import weights as weights_module
from engine.model.check import open_model
from engine.model.config import ModelConfig
from engine.model.decoder import DecoderWeights
from engine.model.shards import Shard
from engine.model.weights import load_weights
from tests.support.models import VARIANTS, make_reference, write_folder, write_gguf
from tests.support.ranks import UNEQUAL

MODELS = {**VARIANTS, "llama three kv heads": UNEQUAL}
CASES = [
    (variant, file_format)
    for variant, made in MODELS.items()
    for file_format in ("folder", "gguf", "Q8_0", "Q4_1", "Q5_0")
    if file_format == "folder" or "rope_parameters" not in made.overrides
]
"""All formats; those with a name of ggml's are GGUF files with matrices of that type."""


class PlainLinear:
    """Keeps what `Linear` packs."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias


def write(variant: str, file_format: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    model = make_reference(MODELS[variant])
    if file_format == "folder":
        return write_folder(model, path)
    if file_format != "gguf":
        add_plain, kind = GGUFWriter.add_tensor, GGMLQuantizationType[file_format]

        def add_quantised(writer: GGUFWriter, name: str, numbers: Any) -> None:
            if numbers.ndim == 2:
                add_plain(writer, name, quantize(numbers, kind), raw_dtype=kind)
            else:
                add_plain(writer, name, numbers)

        monkeypatch.setattr(GGUFWriter, "add_tensor", add_quantised)
    return write_gguf(model, path)


def layer_parts(layer: Any, config: ModelConfig) -> dict[str, Tensor]:
    """Return what a layer has, what was stacked taken apart again; `config` has the sizes of the share."""
    sizes = [config.num_heads * config.head_dim, config.kv_size, config.kv_size]
    parts = dict(zip("qkv", layer.qkv.weight.split(sizes), strict=True))
    if layer.qkv.bias is not None:
        parts |= zip(("q bias", "k bias", "v bias"), layer.qkv.bias.split(sizes), strict=True)
    parts["gate"], parts["up"] = layer.gate_up.weight.chunk(2)
    parts |= {"o": layer.output.weight, "down": layer.down.weight}
    return parts


BY_COLUMNS = {"o", "down"}
WHOLE = ("attn_norm", "mlp_norm", "q_norm", "k_norm")


def load(path: Path, shard: Shard) -> DecoderWeights:
    files = open_model(path)
    return load_weights(files, torch.float32, torch.device("cpu"), lambda _: None, shard)


@pytest.mark.parametrize(("variant", "file_format"), CASES)
def test_shares_joined_are_the_whole(
    variant: str, file_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(variant, file_format, tmp_path / "model", monkeypatch)
    config = open_model(path).config
    monkeypatch.setattr(weights_module, "Linear", PlainLinear)
    whole = load(path, Shard())
    for size in range(2, config.num_kv_heads + 1):
        shards = [Shard(rank, size) for rank in range(size)]
        shares = [load(path, shard) for shard in shards]
        assert torch.equal(torch.cat([share.embedding for share in shares]), whole.embedding)
        heads: list[Any] = [share.head for share in shares]
        assert torch.equal(torch.cat([head.weight for head in heads]), as_plain(whole.head).weight)
        assert all(torch.equal(share.norm, whole.norm) for share in shares)
        for index, layer in enumerate(whole.layers):
            parts = [layer_parts(s.layers[index], shards[r].config(config)) for r, s in enumerate(shares)]
            for name, expected in layer_parts(layer, config).items():
                joined = torch.cat([part[name] for part in parts], 1 if name in BY_COLUMNS else 0)
                assert torch.equal(joined, expected), name
            for name in WHOLE:
                assert_all_equal(
                    [getattr(share.layers[index], name) for share in shares], getattr(layer, name)
                )
            biases = [as_plain(share.layers[index].output).bias for share in shares]
            assert_all_equal(biases[:1], as_plain(layer.output).bias)
            assert biases[1:] == [None] * (size - 1), "a bias must be added once"


def as_plain(linear: Any) -> PlainLinear:
    assert isinstance(linear, PlainLinear)
    return linear


def assert_all_equal(parts: list[Tensor | None], expected: Tensor | None) -> None:
    for part in parts:
        if part is None or expected is None:
            assert part is expected
        else:
            assert torch.equal(part, expected)


def test_a_share_reads_only_its_rows_and_tells_its_progress(tmp_path: Path) -> None:
    files = open_model(write_folder(make_reference(VARIANTS["llama untied"]), tmp_path / "model"))
    told: list[float] = []
    weights = load_weights(files, torch.float32, torch.device("cpu"), told.append, Shard(1, 2))
    assert weights.embedding.shape == (160, 64)
    assert weights.embedding.untyped_storage().nbytes() == 160 * 64 * 4
    assert told == sorted(told)
    assert told[-1] == 1.0
