"""The border to C++: the same structs on both sides, and errors that are Python's."""

import ctypes
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import EngineInvariantError, KernelsUnavailableError
from engine.kernels.cpu import structs as structs_module
from engine.kernels.cpu.build import SOURCE_FOLDER
from engine.kernels.cpu.library import (
    PHASES,
    Kind,
    Linear,
    NativeLibrary,
    NativeModel,
    StepBatch,
    Storage,
    StoredTensor,
    Vector,
    Want,
)
from engine.model.check import open_model
from engine.model.config import config_from_hf
from tests.support.kernels import load_native, make_sizes, open_library
from tests.support.models import VARIANTS, make_reference, write_folder

CONFIG = config_from_hf(
    {
        "model_type": "llama",
        "num_attention_heads": 2,
        "hidden_size": 64,
        "vocab_size": 96,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "max_position_embeddings": 256,
    },
    {},
)


def describe(struct: type[ctypes.Structure]) -> list[int]:
    """Return the size and all offsets of a struct."""
    offsets = [getattr(struct, name).offset for name, *_ in struct._fields_]
    return [ctypes.sizeof(struct), *offsets]


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a compiler")
def test_structs_and_numbers_are_those_of_the_header(tmp_path: Path) -> None:
    structs = {
        "PgError": structs_module.PgError,
        "PgConfig": structs_module.PgConfig,
        "PgTensor": structs_module.PgTensor,
        "PgBatch": structs_module.PgBatch,
    }
    enums: dict[str, Any] = {"PG_": Storage, "PG_KIND_": Kind}
    linear_and_vector = [("PG_", Linear), ("PG_", Vector), ("PG_", Want)]
    expected, lines = [], []
    for name, struct in structs.items():
        expected += describe(struct)
        lines.append(f"show(sizeof({name}));")
        lines += [f"show(offsetof({name}, {field}));" for field, *_ in struct._fields_]
    for prefix, enum in [*enums.items(), *linear_and_vector]:
        expected += [member.value for member in enum]
        lines += [f"show({prefix}{member.name});" for member in enum]
    program = tmp_path / "show.cpp"
    program.write_text(
        f'#include <cstddef>\n#include <cstdio>\n#include "{SOURCE_FOLDER / "api.h"}"\n'
        'void show(long n) { std::printf("%ld ", n); }\n'
        f"int main() {{ {' '.join(lines)} }}\n"
    )
    subprocess.run(["c++", "-std=c++17", str(program), "-o", str(tmp_path / "show")], check=True)
    shown = subprocess.run([str(tmp_path / "show")], check=True, capture_output=True, text=True).stdout
    assert list(map(int, shown.split())) == expected


@pytest.mark.parametrize("content", [b"", b"no library", b"\x7fELF" + bytes(60)])
def test_a_damaged_library_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "avx2-0-0.so"
    path.write_bytes(content)
    with pytest.raises(KernelsUnavailableError, match=r"avx2-0-0\.so cannot be loaded .*; remove the file"):
        NativeLibrary(path)


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a compiler")
def test_a_library_of_another_version_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.cpp").write_text('extern "C" const char* pg_isa() { return "avx2"; }\n')
    path = tmp_path / "a.so"
    subprocess.run(["c++", "-shared", "-fPIC", str(tmp_path / "a.cpp"), "-o", str(path)], check=True)
    with pytest.raises(KernelsUnavailableError, match="pg_create"):
        NativeLibrary(path)


def test_the_pool_takes_what_a_block_was_said_to_take() -> None:
    library = open_library()
    for kv_dtype in ("bf16", "int8"):
        sizes = make_sizes(kv_dtype=kv_dtype, num_blocks=5)
        per_block = library.kv_bytes_per_block(CONFIG, sizes)
        assert per_block >= CONFIG.kv_bytes_per_token(1 if kv_dtype == "int8" else 2) * sizes.block_size


def test_a_model_without_all_weights_does_not_finish() -> None:
    model = NativeModel(open_library(), CONFIG, make_sizes())
    with pytest.raises(EngineInvariantError, match=r"refuse an argument: ."):
        model.finish()


def test_a_weight_of_the_wrong_shape_is_refused() -> None:
    model = NativeModel(open_library(), CONFIG, make_sizes())
    numbers = np.zeros((64, 32), np.float32)
    with pytest.raises(EngineInvariantError, match=r"refuse an argument: ."):
        model.set_linear(0, Linear.Q, Kind.INT8, [StoredTensor(numbers, Storage.F32, 64, 32)])


def test_a_closed_model_is_not_used() -> None:
    model = NativeModel(open_library(), CONFIG, make_sizes())
    model.close()
    model.close()
    with pytest.raises(EngineInvariantError, match="closed"):
        model.step(StepBatch())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> NativeModel:
    folder = write_folder(make_reference(VARIANTS["llama tied"]), tmp_path_factory.mktemp("model"))
    return load_native(open_model(folder), make_sizes(num_blocks=4))


def make_batch(table: list[int], tokens: list[int]) -> StepBatch:
    batch = StepBatch()
    batch.token_ids.extend(tokens)
    batch.num_computed.append(0)
    batch.num_scheduled.append(len(tokens))
    batch.tables.extend(table)
    batch.table_starts.append(len(table))
    batch.wants.append(Want.GREEDY)
    batch.temperatures.append(1.0)
    batch.top_ks.append(0)
    batch.top_ps.append(1.0)
    batch.uniforms.append(0.0)
    return batch


@pytest.mark.parametrize(
    ("table", "tokens"),
    [([4], [1]), ([-1], [1]), ([0], [1] * 9), ([0], [320]), ([0], [-1]), ([], [1])],
    ids=["block too high", "block below 0", "too few blocks", "token too high", "token below 0", "no block"],
)
def test_a_step_that_cannot_be_is_refused_and_the_model_goes_on(
    model: NativeModel, table: list[int], tokens: list[int]
) -> None:
    with pytest.raises(EngineInvariantError, match=r"refuse an argument: ."):
        model.step(make_batch(table, tokens))
    assert model.step(make_batch([3], [1, 2, 3])).token_ids[0] >= 0


def test_a_step_says_how_long_it_took(model: NativeModel) -> None:
    output = model.step(make_batch([0], [1, 2, 3]))
    assert output.forward_ns > 0
    assert output.sample_ns >= 0
    assert model.weight_bytes > 0
    assert model.kv_bytes == 4 * open_library().kv_bytes_per_block(model.config, model.sizes)
    assert model.view_kv().shape == (model.kv_bytes,)


def test_the_phases_of_a_step_add_up_to_its_time(model: NativeModel) -> None:
    before = model.phase_ns()
    output = model.step(make_batch([0], [1, 2, 3]))
    spent = {name: ns - before[name] for name, ns in model.phase_ns().items()}
    assert tuple(spent) == PHASES
    assert all(ns >= 0 for ns in spent.values())
    assert 0 < sum(spent.values()) <= output.forward_ns + output.sample_ns


def test_what_the_machine_can_do_is_measured() -> None:
    ceilings = open_library().measure_ceilings(1)
    assert all(number > 0 for number in asdict(ceilings).values())


def test_ceilings_of_no_threads_are_refused() -> None:
    with pytest.raises(EngineInvariantError, match="num_threads"):
        open_library().measure_ceilings(0)
