"""Whole models: every tensor is used, knowingly ignored or refused by name, without torch."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine.errors import ModelError
from engine.model.check import open_model
from engine.model.tensor_info import TensorInfo
from engine.model.tensor_names import FREQ_FACTORS, match_tensors
from tests.support.models import VARIANTS, make_reference, write_folder, write_gguf

Tensors = dict[str, TensorInfo]


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(make_reference(VARIANTS["llama tied"]), tmp_path_factory.mktemp("m") / "tiny.gguf")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(make_reference(VARIANTS["llama untied"]), tmp_path_factory.mktemp("m") / "tiny")


def test_a_model_is_described_without_loading_it(gguf_path: Path, folder: Path) -> None:
    gguf, hf = open_model(gguf_path).info, open_model(folder).info
    assert (gguf.name, gguf.file_format, gguf.architecture, gguf.storage) == ("tiny", "gguf", "llama", "F32")
    assert (hf.name, hf.file_format, hf.vocab_size, hf.max_position) == ("tiny", "safetensors", 320, 256)
    assert hf.num_parameters == gguf.num_parameters + 320 * 64  # the head of its own
    assert gguf.num_bytes == 4 * gguf.num_parameters


def test_checking_a_model_imports_no_torch(gguf_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from engine.model.check import open_model;"
        f"open_model(Path({str(gguf_path)!r})); print('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def add(name: str, shape: tuple[int, ...] = (8,)) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = replace(tensors["token_embd.weight"], name=name, shape=shape)

    return change


def drop(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        del tensors[name]

    return change


def set_field(name: str, **fields: object) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = replace(tensors[name], **fields)  # type: ignore[arg-type]  # fields by name

    return change


REFUSED = {
    "missing in a layer": (drop("blk.1.ffn_up.weight"), "'blk.1.ffn_up.weight' is missing"),
    "missing norm": (drop("output_norm.weight"), "'output_norm.weight' is missing"),
    "unknown tensor": (add("blk.0.ffn_up_exps.weight"), "'blk.0.ffn_up_exps.weight' is unknown"),
    "bias of another family": (add("blk.0.ffn_up.bias"), "'blk.0.ffn_up.bias' is unknown"),
    "one layer too many": (add("blk.2.attn_norm.weight", (64,)), "'blk.2.attn_norm.weight' is unknown"),
    "wrong shape": (
        set_field("blk.0.attn_k.weight", shape=(64, 32)),
        "has shape [64, 32], expected [32, 64]",
    ),
    "integers": (set_field("blk.0.attn_k.weight", dtype="I32"), "type I32"),
    "frequency factors of wrong size": (add("rope_freqs.weight", (9,)), "has shape [9]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_tensor_that_does_not_fit_is_refused_by_name(case: str, gguf_path: Path) -> None:
    files = open_model(gguf_path)
    assert files.gguf is not None
    tensors = dict(files.gguf.tensors)
    change, named = REFUSED[case]
    change(tensors)
    with pytest.raises(ModelError) as caught:
        match_tensors(files.config, tensors, is_gguf=True)
    assert named in str(caught.value)


def test_frequency_factors_are_used_and_rotary_tables_ignored(gguf_path: Path, folder: Path) -> None:
    files = open_model(gguf_path)
    assert files.gguf is not None
    tensors = dict(files.gguf.tensors)
    add("rope_freqs.weight")(tensors)
    assert FREQ_FACTORS in match_tensors(files.config, tensors, is_gguf=True)
    hf = open_model(folder)
    place = hf.weights["norm.weight"]
    stored = {tensor.name: tensor for tensor in hf.weights.values()}
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert match_tensors(hf.config, {**stored, name: replace(place, name=name)}, is_gguf=False) == hf.weights


def test_a_folder_that_is_not_tied_must_have_its_head(folder: Path) -> None:
    files = open_model(folder)
    stored = {tensor.name: tensor for tensor in files.weights.values() if tensor.name != "lm_head.weight"}
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        match_tensors(files.config, stored, is_gguf=False)


def test_sharded_folders_are_read_through_their_index(tmp_path: Path) -> None:
    folder = write_folder(
        make_reference(VARIANTS["qwen2 with biases"]), tmp_path / "m", max_shard_size="100KB"
    )
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert open_model(folder).info.architecture == "qwen2"


def test_missing_models_and_folders_without_a_model_are_refused(tmp_path: Path) -> None:
    for path, named in (
        (tmp_path / "absent", "no such"),
        (tmp_path, "config.json"),
        (Path("a\0b"), "no such|cannot"),
        (Path("/dev/null"), "no such"),
    ):
        with pytest.raises(ModelError, match=named):
            open_model(path)


def test_code_that_a_folder_names_is_never_imported(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    config = json.loads((copy / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "canary.Config", "AutoModelForCausalLM": "canary.Model"}
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "canary.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert open_model(copy).info.architecture == "llama"
    assert not (tmp_path / "ran").exists()
