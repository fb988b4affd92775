"""Loading synthetic models: progress, resolved settings, what serves where something is missing, refusals."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine import native_backend
from engine.api import generate
from engine.config import EngineConfig
from engine.errors import ConfigError, ModelError, RequestError
from engine.kernels.cpu import build as build_module
from engine.kernels.cpu.build import build
from engine.kernels.cpu.instruction_sets import runnable
from engine.loading import LoadProgress, LoadRequest, load_engine
from engine.runner.native_runner import NativeRunner
from engine.runner.torch_runner import TorchRunner
from engine.sampling_params import SamplingParams
from tests.support.kernels import open_library
from tests.support.models import VARIANTS, make_reference, write_folder
from tests.support.tokenizers import make_byte_level, write_tokenizer


@pytest.fixture(scope="module")
def request_for_tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadRequest:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_folder(make_reference(VARIANTS["llama tied"]), folder)
    write_tokenizer(folder, make_byte_level())
    config = EngineConfig(num_blocks=32, block_size=8)
    return LoadRequest(model_path=folder, config=config, cache_dir=folder.parent / "cache", device="cpu")


def load_quietly(request: LoadRequest) -> None:
    load_engine(request, lambda progress: None)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_progress_goes_through_all_stages_and_only_forward(
    request_for_tiny: LoadRequest, kernels: str
) -> None:
    open_library()
    seen: list[LoadProgress] = []
    load_engine(replace(request_for_tiny, kernels=kernels), seen.append)
    stages = list(dict.fromkeys(progress.stage for progress in seen))
    assert stages == ["header", "weights", "tokenizer", "kv_pool", "warm_up", "ready"]
    fractions = [progress.fraction for progress in seen]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert sum(progress.stage == "weights" for progress in seen) > 10


def test_settings_are_resolved_against_the_model(request_for_tiny: LoadRequest) -> None:
    exact = replace(request_for_tiny, dtype="fp32")
    by_count = load_engine(exact, lambda progress: None).core.config
    assert (by_count.num_blocks, by_count.max_model_len) == (32, 256)
    # 2 layers * 2 * 2 heads * 16 numbers * 4 bytes = 512 bytes a token, 4,096 a block
    by_memory = load_engine(replace(exact, kv_memory_bytes=50_000), lambda progress: None).core.config
    assert (by_memory.num_blocks, by_memory.max_model_len) == (12, 96)
    narrow = replace(exact, kv_memory_bytes=50_000, dtype="bf16", kernels="torch")
    assert load_engine(narrow, lambda progress: None).core.config.num_blocks == 24


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_host_tier_has_as_many_blocks_as_its_memory_holds_and_its_costs_are_measured(
    request_for_tiny: LoadRequest, kernels: str
) -> None:
    open_library()
    request = replace(request_for_tiny, kernels=kernels, dtype="bf16", swap_memory_bytes=50_000)
    core = load_engine(request, lambda progress: None).core
    # 2 layers * 2 * 2 heads * 16 numbers * 2 bytes = 256 bytes a token, 2,048 a block
    assert core.config.num_host_blocks == 24
    assert core.config.recompute_ns_per_token > 0
    assert core.config.swap_ns_per_block > 0
    assert isinstance(core.runner, NativeRunner | TorchRunner)
    memory = core.runner.copier.memory
    assert (memory.num_blocks, memory.num_host_blocks) == (32, 24)


def test_without_a_host_tier_nothing_is_measured(request_for_tiny: LoadRequest) -> None:
    config = load_engine(request_for_tiny, lambda progress: None).core.config
    assert (config.recompute_ns_per_token, config.swap_ns_per_block) == (0, 0)


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_a_native_pool_has_as_many_blocks_as_its_memory_holds(
    request_for_tiny: LoadRequest, kv_dtype: str
) -> None:
    open_library()
    request = replace(request_for_tiny, kv_dtype=kv_dtype, kv_memory_bytes=200_000)
    engine = load_engine(request, lambda progress: None)
    assert isinstance(engine.core.runner, NativeRunner)
    per_block = engine.core.runner.model.kv_bytes // engine.core.config.num_blocks
    assert engine.core.config.num_blocks == 200_000 // per_block
    assert engine.info.kv_dtype == kv_dtype


@pytest.mark.parametrize(
    ("options", "runner", "told"),
    [
        ({}, NativeRunner, "int8 weights, bf16 KV cache, native"),
        ({"dtype": "bf16", "num_threads": 1}, NativeRunner, "bf16 weights, bf16 KV cache, native"),
        ({"kv_dtype": "int8"}, NativeRunner, "int8 weights, int8 KV cache, native"),
        ({"dtype": "fp32"}, TorchRunner, "fp32 weights, fp32 KV cache, plain torch"),
        ({"kernels": "torch", "dtype": "bf16"}, TorchRunner, "bf16 weights, bf16 KV cache, plain torch"),
    ],
)
def test_what_was_chosen_runs_and_is_logged_in_one_line(
    request_for_tiny: LoadRequest,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, object],
    runner: type,
    told: str,
) -> None:
    open_library()
    with caplog.at_level(logging.INFO, "engine.loading"):
        engine = load_engine(replace(request_for_tiny, **options), lambda progress: None)  # type: ignore[arg-type]  # fields by name
    assert isinstance(engine.core.runner, runner)
    assert str(engine.info).startswith(told)
    assert [record.message for record in caplog.records] == [f"tiny: {engine.info}"]
    greedy = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    assert len(generate(engine, ["hi"], greedy)) == 1


def test_without_a_compiler_torch_serves_and_the_log_says_what_to_install(
    request_for_tiny: LoadRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(build_module, "default_folder", lambda: tmp_path / "kernels")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    engine = load_engine(request_for_tiny, lambda progress: None)
    assert isinstance(engine.core.runner, TorchRunner)
    assert (engine.info.kernels, engine.info.dtype) == ("torch", "fp32")
    [warning] = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert "apt-get install g++" in warning
    assert "The plain torch path serves instead" in warning
    for options in ({"dtype": "int8"}, {"kv_dtype": "int8"}, {"kernels": runnable()[0]}):
        with pytest.raises(ConfigError, match=r"cannot be had.*apt-get install g\+\+"):
            load_quietly(replace(request_for_tiny, **options))  # type: ignore[arg-type]  # fields by name


def test_compiling_at_the_start_is_most_of_the_progress(
    request_for_tiny: LoadRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_library()

    def build_slowly(isa: str, *, on_wait: Callable[[float], None]) -> Path:
        on_wait(4.0)
        on_wait(400.0)
        return build(isa)

    monkeypatch.setattr(native_backend, "build", build_slowly)
    seen: list[LoadProgress] = []
    load_engine(request_for_tiny, seen.append)
    fractions = [progress.fraction for progress in seen]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    compiling = [progress.fraction for progress in seen if progress.stage == "kernels"]
    assert compiling == pytest.approx([0.09, 0.9])


def test_a_damaged_library_is_compiled_again(
    request_for_tiny: LoadRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_library()
    damaged = tmp_path / "damaged.so"
    damaged.write_bytes(b"")

    def build_badly(isa: str, *, on_wait: Callable[[float], None]) -> Path:
        return damaged if damaged.exists() else build(isa)

    monkeypatch.setattr(native_backend, "build", build_badly)
    engine = load_engine(request_for_tiny, lambda progress: None)
    assert isinstance(engine.core.runner, NativeRunner)
    assert not damaged.exists()


def test_a_script_can_generate(request_for_tiny: LoadRequest) -> None:
    engine = load_engine(request_for_tiny, lambda progress: None)
    assert engine.model_name == "tiny"
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    together = generate(engine, ["hi", "hello there", "é"], greedy)
    alone = [generate(engine, [prompt], greedy)[0] for prompt in ["hi", "hello there", "é"]]
    assert together == alone
    drawn = SamplingParams(max_tokens=8, temperature=1.0, seed=3)
    assert generate(engine, ["hi"], drawn) == generate(engine, ["hi"], drawn)
    with pytest.raises(RequestError):
        generate(engine, ["hi", ""], greedy)
    assert not engine.core.has_work


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dtype": "q4"}, "no weights of four bits"),
        ({"dtype": "int8", "kernels": "torch"}, "native kernels"),
        ({"kernels": "sse"}, "kernels"),
        ({"kv_dtype": "fp8"}, "kv_dtype"),
        ({"dtype": "fp16"}, "dtype"),
        ({"device": "tpu"}, "device"),
        ({"num_threads": 0}, "num_threads"),
        ({"kv_memory_bytes": 1}, "kv_memory"),
        ({"kv_memory_bytes": 1 << 60, "config": EngineConfig(block_size=256)}, "memory"),
        ({"swap_memory_bytes": 1}, "swap_memory"),
        ({"swap_memory_bytes": 1 << 44}, "--swap-memory"),
        ({"config": EngineConfig(max_num_seqs=-1)}, "max_num_seqs"),
        ({"tensor_parallel_size": 2, "swap_memory_bytes": 1 << 20}, "tensor_parallel_size"),
        ({"attention": "varlen"}, "attention"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    changes: dict[str, object], named: str, request_for_tiny: LoadRequest
) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        load_quietly(replace(request_for_tiny, **changes))  # type: ignore[arg-type]  # fields by name
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_cuda_without_cuda_is_refused(request_for_tiny: LoadRequest) -> None:
    with pytest.raises(ConfigError, match="cuda"):
        load_quietly(replace(request_for_tiny, device="cuda"))


def test_model_errors_come_through(request_for_tiny: LoadRequest, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such"):
        load_quietly(replace(request_for_tiny, model_path=tmp_path / "absent"))
    folder = write_folder(make_reference(VARIANTS["llama tied"]), tmp_path / "m")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_quietly(replace(request_for_tiny, model_path=folder))
