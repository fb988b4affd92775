"""From files to the kernels: every tensor handed over as it is stored, and kept as the number format says."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.errors import ModelError
from engine.kernels.cpu import pack
from engine.kernels.cpu.library import Kind, Linear, NativeLibrary, NativeSizes, Storage, StoredTensor, Vector
from engine.kernels.cpu.pack import pack_model
from engine.kernels.cpu.suitability import (
    find_obstacle,
    has_four_bit_weights,
    is_mostly_four_bit,
    packed_bytes,
)
from engine.model.check import ModelFiles, open_model
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.gguf import map_file
from engine.model.stored_numbers import to_float32, view_bytes
from engine.model.weights import load_weights
from engine.runner.batch import make_inputs
from engine.runner.native_runner import NativeRunner
from engine.sampling_params import SamplingParams
from engine.scheduling.output import ScheduledSequence
from engine.sequence import EngineRequest, Sequence
from tests.support.kernels import load_native, make_sizes, requantize
from tests.support.models import VARIANTS, VOCAB_SIZE, make_reference, write_folder, write_gguf

LIBRARY: Any = None


@dataclass
class Recorder:
    """Stands in for a model in the library; keeps what it was given."""

    library: NativeLibrary
    config: ModelConfig
    sizes: NativeSizes
    linears: dict[tuple[int, Linear], tuple[Kind, list[StoredTensor]]] = field(default_factory=dict)
    vectors: dict[tuple[int, Vector], StoredTensor] = field(default_factory=dict)
    is_finished: bool = False
    is_closed: bool = False

    def set_linear(self, layer: int, which: Linear, kind: Kind, tensors: list[StoredTensor]) -> None:
        self.linears[layer, which] = (kind, tensors)

    def set_vector(self, layer: int, which: Vector, values: StoredTensor) -> None:
        self.vectors[layer, which] = values

    def set_rotary(self, cosines: Any, sines: Any) -> None:
        self.rotary = (cosines, sines)

    def finish(self) -> None:
        self.is_finished = True

    def close(self) -> None:
        self.is_closed = True


def record(files: ModelFiles, dtype: str, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setattr(pack, "NativeModel", Recorder)
    shares: list[float] = []
    recorder: Any = pack_model(LIBRARY, files, make_sizes(dtype=dtype), shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert recorder.is_finished
    return recorder  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(make_reference(VARIANTS["llama untied"]), tmp_path_factory.mktemp("folder"))


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_reference(VARIANTS["llama attention bias"])
    model.config.tie_word_embeddings = True
    return write_gguf(model, tmp_path_factory.mktemp("gguf") / "model.gguf")


MIXED = {
    "q.weight": "Q4_1",
    "k.weight": "Q4_0",
    "v.weight": "Q8_0",
    "gate.weight": "Q4_1",
    "up.weight": "Q4_0",
}


def test_every_weight_is_handed_over_once_and_as_it_is_stored(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = requantize(open_model(gguf), {**MIXED, "down.weight": "Q5_0"}, tmp_path / "weights")
    recorder = record(files, "q4", monkeypatch)
    assert {layer for layer, _ in recorder.linears} == {0, 1}
    for linear, kind, storage in (
        (Linear.Q, Kind.Q4, Storage.Q4_1),
        (Linear.K, Kind.Q4, Storage.Q4_0),
        (Linear.V, Kind.INT8, Storage.Q8_0),
        (Linear.O, Kind.INT8, Storage.F32),
        (Linear.GATE_UP, Kind.INT8, Storage.F32),  # two types: neither can be kept
        (Linear.DOWN, Kind.INT8, Storage.F32),  # a type that no kernel reads
    ):
        found_kind, tensors = recorder.linears[1, linear]
        assert (found_kind, {tensor.storage for tensor in tensors}) == (kind, {storage}), linear
    assert (0, Linear.EMBED) not in recorder.linears
    assert set(recorder.vectors) == {
        *((layer, vector) for layer in range(2) for vector in (Vector.ATTN_NORM, Vector.MLP_NORM)),
        *((layer, vector) for layer in range(2) for vector in (Vector.Q_BIAS, Vector.K_BIAS)),
        *((layer, vector) for layer in range(2) for vector in (Vector.V_BIAS, Vector.O_BIAS)),
        (0, Vector.FINAL_NORM),
    }
    for name, (linear, at) in {
        "q": (Linear.Q, 0),
        "up": (Linear.GATE_UP, 1),
        "down": (Linear.DOWN, 0),
    }.items():
        stored = files.weights[f"layers.0.{name}.weight"]
        tensor = recorder.linears[0, linear][1][at]
        raw = view_bytes(stored, map_file(stored.path))
        expected = to_float32(stored, raw) if tensor.storage is Storage.F32 else raw
        np.testing.assert_array_equal(tensor.data, expected)
        assert (tensor.rows, tensor.columns) == stored.shape


def test_rotary_rows_are_marked_where_the_file_has_them_interleaved(
    gguf: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = record(open_model(gguf), "int8", monkeypatch)
    heads = {
        linear: recorder.linears[0, linear][1][0].rotary_heads for linear in (Linear.Q, Linear.K, Linear.V)
    }
    assert heads == {Linear.Q: 4, Linear.K: 2, Linear.V: 0}
    biases = {v: recorder.vectors[0, v].rotary_heads for v in (Vector.Q_BIAS, Vector.K_BIAS, Vector.V_BIAS)}
    assert biases == {Vector.Q_BIAS: 4, Vector.K_BIAS: 2, Vector.V_BIAS: 0}
    others = record(open_model(folder), "int8", monkeypatch)
    assert not any(tensor.rotary_heads for _, tensors in others.linears.values() for tensor in tensors)


@pytest.mark.parametrize(("dtype", "kind"), [("int8", Kind.INT8), ("bf16", Kind.BF16), ("fp32", Kind.F32)])
def test_other_formats_keep_all_weights_alike(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, kind: Kind
) -> None:
    files = requantize(open_model(folder), MIXED, tmp_path / "weights")
    recorder = record(files, dtype, monkeypatch)
    assert {kept for kept, _ in recorder.linears.values()} == {kind}
    assert {(0, Linear.HEAD), (0, Linear.EMBED)} <= set(recorder.linears)


def test_a_type_that_cannot_be_read_is_named_and_the_model_is_closed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Recorder] = []

    class Closing(Recorder):
        def close(self) -> None:
            closed.append(self)

    monkeypatch.setattr(pack, "NativeModel", Closing)
    files = requantize(open_model(folder), {"layers.1.up.weight": "Q8_0"}, tmp_path / "weights")
    num_bytes = 96 * 64 // 32 * 40
    files.weights["layers.1.up.weight"] = replace(
        files.weights["layers.1.up.weight"], dtype="Q8_1", num_bytes=num_bytes
    )
    (tmp_path / "weights").write_bytes(bytes(num_bytes))
    with pytest.raises(ModelError, match=r"layers\.1\.up\.weight.*Q8_1"):
        pack_model(LIBRARY, files, make_sizes(), lambda share: None)
    assert len(closed) == 1


def test_headers_tell_what_the_kernels_can_do(folder: Path, tmp_path: Path) -> None:
    files = open_model(folder)
    assert not has_four_bit_weights(files)
    some = requantize(files, {"q.weight": "Q4_0"}, tmp_path / "some")
    assert (has_four_bit_weights(some), is_mostly_four_bit(some)) == (True, False)
    most = requantize(files, {"weight": "Q4_1"}, tmp_path / "most")
    assert (has_four_bit_weights(most), is_mostly_four_bit(most)) == (True, True)
    assert packed_bytes(most, "q4") < packed_bytes(most, "int8") < packed_bytes(most, "bf16")
    assert packed_bytes(most, "fp32") == 4 * most.info.num_parameters
    assert find_obstacle(files.config) is None


@pytest.mark.parametrize("head_dim", [24, 8, 272])
def test_heads_of_other_sizes_are_an_obstacle_that_is_named(tmp_path: Path, head_dim: int) -> None:
    overrides = {"head_dim": head_dim, "num_hidden_layers": 1}
    model = make_reference(VARIANTS["llama tied"].__class__("llama", overrides))
    assert f"this model's have {head_dim}" in (
        find_obstacle(open_model(write_folder(model, tmp_path)).config) or ""
    )


def torch_logits(files: ModelFiles, token_ids: list[int]) -> Any:
    """Return the logits (tokens, vocab_size) after each token in float32."""
    with torch.inference_mode():
        weights = load_weights(files, torch.float32, torch.device("cpu"), lambda share: None)
        decoder = Decoder(files.config, weights, files.config.max_position)
        request = EngineRequest(
            request_id="", prompt_token_ids=token_ids, sampling_params=SamplingParams(temperature=0.0)
        )
        sequence = Sequence(0, request, max_tokens=1)
        sequence.block_table = [0, 1, 2, 3, 4]
        batch = decoder.make_batch(make_inputs([ScheduledSequence(sequence, 0, len(token_ids))], 8))
        batch.logits_rows = torch.arange(len(token_ids))  # (tokens) int64
        return decoder.forward(batch, decoder.make_cache(5, 8)).numpy()


@pytest.mark.parametrize("name", [name for name in VARIANTS if "head_dim" not in name])
def test_native_logits_are_those_of_torch_for_every_kind_of_model(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = make_reference(VARIANTS[name])
    files = open_model(write_folder(model, tmp_path / "model"))
    token_ids = np.random.default_rng(3).integers(0, VOCAB_SIZE, 33).tolist()
    expected = torch_logits(files, token_ids)
    for dtype, tolerance in (("fp32", 0.04), ("bf16", 0.08), ("int8", 0.25)):
        runner = NativeRunner(load_native(files, make_sizes(dtype=dtype)), eos_token_ids=frozenset())
        got = runner.logits(token_ids)
        assert got.shape == expected.shape
        error = np.abs(got - expected).max() / expected.std()
        assert error < tolerance, (dtype, error)
        runner.model.close()


@pytest.mark.parametrize(
    "types", [{"weight": "Q4_1"}, MIXED, {"weight": "Q8_0"}, {"weight": "F16"}, {"weight": "BF16"}]
)
def test_native_logits_are_those_of_torch_for_every_storage(
    gguf: Path, tmp_path: Path, types: dict[str, str]
) -> None:
    files = requantize(open_model(gguf), types, tmp_path / "weights")
    token_ids = np.random.default_rng(4).integers(0, VOCAB_SIZE, 33).tolist()
    expected = torch_logits(files, token_ids)
    for dtype, tolerance in (("fp32", 0.04), ("q4", 0.12)):
        runner = NativeRunner(load_native(files, make_sizes(dtype=dtype)), eos_token_ids=frozenset())
        error = np.abs(runner.logits(token_ids) - expected).max() / expected.std()
        assert error < tolerance, (dtype, error)
        runner.model.close()
