"""Loading for a GPU, on a stand-in for one: what runs, how the pool is sized, what is refused."""

import importlib
import logging
from dataclasses import replace

import pytest
import torch

from engine import loading, torch_backend
from engine.api import generate
from engine.config import AS_SUITS, EngineConfig
from engine.errors import ConfigError
from engine.loading import LoadedEngine, LoadProgress, LoadRequest, load_engine
from engine.machine import Gpus, is_triton_interpreted
from engine.model.decoder import Arithmetic
from engine.runner import torch_facts
from engine.runner.cuda_runner import CudaRunner
from engine.runner.memory_plan import GRAPH_BYTES
from engine.sampling_params import SamplingParams
from tests.support.fake_gpu import FakeGpu
from tests.support.models import VARIANTS, make_reference, write_folder
from tests.support.padded_attention import PaddedAttention
from tests.support.tokenizers import make_byte_level, write_tokenizer

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = ["hi", "hello there", "é", "one more"]
BLOCK_BYTES = 4096
"""2 layers * 2 * 2 heads * 16 numbers * 4 bytes * 8 tokens."""

BUCKETS = [1, 2, 4, 6]
GRAPHS = 700 + sum(BUCKETS) * 320 * 4 + len(BUCKETS) * GRAPH_BYTES  # 320 logits of 4 bytes
TOTAL = 40 << 20


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    torch.set_num_threads(1)
    fake = FakeGpu(TOTAL, free=TOTAL - 1000, held=30_000, peaks=[700, 900])
    monkeypatch.setattr(loading, "_find_gpus", lambda device: Gpus(1, (9, 0)))
    monkeypatch.setattr(torch_backend, "open_gpu", lambda: fake)
    return fake


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let attention be one that can be captured, as those of a GPU can."""
    monkeypatch.setattr(torch_backend, "make_arithmetic", lambda *facts: Arithmetic(PaddedAttention()))


@pytest.fixture(scope="module")
def request_for_tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadRequest:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_folder(make_reference(VARIANTS["llama tied"]), folder)
    write_tokenizer(folder, make_byte_level())
    config = EngineConfig(
        num_blocks=AS_SUITS,
        block_size=8,
        max_num_seqs=6,
        max_num_batched_tokens=40,
        max_model_len=96,
    )
    return LoadRequest(
        model_path=folder,
        config=config,
        cache_dir=folder.parent / "cache",
        dtype="fp32",
        attention="reference",
    )


def load(request: LoadRequest) -> LoadedEngine:
    return load_engine(request, lambda progress: None)


@pytest.mark.usefixtures("captured")
def test_without_an_option_a_gpu_serves_and_its_memory_is_used(
    request_for_tiny: LoadRequest, gpu: FakeGpu, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[LoadProgress] = []
    with caplog.at_level(logging.INFO):
        engine = load_engine(request_for_tiny, seen.append)
    runner = engine.core.runner
    assert isinstance(runner, CudaRunner)
    assert str(engine.info).endswith("torch with reference attention, cuda")
    room = int(TOTAL * 0.9) - 30_000 - 900 - GRAPHS
    assert engine.core.config.num_blocks == room // BLOCK_BYTES
    assert f"weights take 30,000, a step up to 900, CUDA graphs about {GRAPHS:,}" in caplog.text
    stages = list(dict.fromkeys(progress.stage for progress in seen))
    assert stages == ["header", "weights", "tokenizer", "kv_pool", "warm_up", "ready"]
    expected = generate(load(replace(request_for_tiny, device="cpu")), PROMPTS, GREEDY)
    assert generate(engine, PROMPTS, GREEDY) == expected
    assert runner.num_taken > 10
    assert gpu.device.graphs


@pytest.mark.skipif(not is_triton_interpreted(), reason="computes what is on the CPU in Triton's interpreter")
def test_the_triton_kernels_serve_on_a_gpu(
    request_for_tiny: LoadRequest, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its interpreter computes them here, which is why they can be given tensors on the CPU.
    importlib.import_module("tests.support.triton_interpreter")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    engine = load(replace(request_for_tiny, attention="auto"))
    assert engine.info.attention == "triton"
    assert str(engine.info).endswith("torch with triton attention, cuda")
    few = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    expected = generate(load(replace(request_for_tiny, device="cpu")), PROMPTS[:2], few)
    assert generate(engine, PROMPTS[:2], few) == expected
    assert gpu.device.graphs


def test_limits_of_a_step_suit_a_gpu(request_for_tiny: LoadRequest, gpu: FakeGpu) -> None:
    config = EngineConfig(num_blocks=64, block_size=8, max_num_seqs=AS_SUITS, max_num_batched_tokens=AS_SUITS)
    resolved = load(replace(request_for_tiny, config=config)).core.config
    assert (resolved.max_num_seqs, resolved.max_num_batched_tokens) == (256, 8192)
    assert (resolved.num_blocks, resolved.max_model_len) == (64, 256)
    assert gpu.num_measured == 0  # the pool was counted in blocks


@pytest.mark.usefixtures("captured")
def test_what_is_switched_off_is_off(request_for_tiny: LoadRequest, gpu: FakeGpu) -> None:
    engine = load(replace(request_for_tiny, async_scheduling=False, cuda_graphs=False))
    runner = engine.core.runner
    assert isinstance(runner, CudaRunner)
    expected = generate(load(replace(request_for_tiny, device="cpu")), PROMPTS, GREEDY)
    assert generate(engine, PROMPTS, GREEDY) == expected
    assert runner.num_taken == 0
    assert gpu.device.graphs == []
    # Nothing is kept for graphs, either.
    assert engine.core.config.num_blocks == (int(TOTAL * 0.9) - 30_000 - 900) // BLOCK_BYTES


@pytest.mark.parametrize("kv_memory_bytes", [100_000, None])
def test_a_pool_of_a_given_size_is_not_measured(
    request_for_tiny: LoadRequest, gpu: FakeGpu, kv_memory_bytes: int | None
) -> None:
    config = request_for_tiny.config
    if kv_memory_bytes is None:
        config = EngineConfig(num_blocks=24, block_size=8, max_num_seqs=6, max_num_batched_tokens=40)
    engine = load(replace(request_for_tiny, config=config, kv_memory_bytes=kv_memory_bytes))
    assert engine.core.config.num_blocks == 24
    assert gpu.num_measured == 0


def test_a_host_tier_goes_with_a_measured_pool(request_for_tiny: LoadRequest, gpu: FakeGpu) -> None:
    engine = load(replace(request_for_tiny, swap_memory_bytes=50_000))
    assert engine.core.config.num_host_blocks == 12
    assert engine.core.config.swap_ns_per_block > 0
    assert isinstance(engine.core.runner, CudaRunner)
    memory = engine.core.runner.copier.memory
    assert (memory.num_blocks, memory.num_host_blocks) == (engine.core.config.num_blocks, 12)


@pytest.mark.parametrize(
    ("free", "utilization", "message"),
    [
        # 50 KB of weights: the model has about as many parameters, of 4 bytes each.
        (
            50_000,
            0.9,
            r"Weights of [\d,]+ bytes do not fit into 50,000 bytes on the GPU; use a smaller model",
        ),
        (32_000_000, 0.0001, r"gpu_memory_utilization is 0\.0001, .* use a larger --gpu-memory-utilization"),
    ],
)
def test_too_little_memory_is_refused_in_one_line(
    request_for_tiny: LoadRequest,
    monkeypatch: pytest.MonkeyPatch,
    gpu: FakeGpu,
    free: int,
    utilization: float,
    message: str,
) -> None:
    small = FakeGpu(TOTAL, free=free, held=30_000, peaks=[700, 900])
    monkeypatch.setattr(torch_backend, "open_gpu", lambda: small)
    with pytest.raises(ConfigError, match=message) as caught:
        load(replace(request_for_tiny, gpu_memory_utilization=utilization))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCompile with ..."),
            r"device is cuda, but the GPU cannot be used: .* busy or unavailable; use cpu, or choose",
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory."),
            r"but the GPU cannot be used: CUDA out of memory; use",
        ),
    ],
)
def test_a_gpu_that_cannot_be_opened_is_refused_in_one_line(
    request_for_tiny: LoadRequest, monkeypatch: pytest.MonkeyPatch, error: RuntimeError, message: str
) -> None:

    def fail(device: torch.device) -> None:
        raise error

    monkeypatch.setattr(loading, "_find_gpus", lambda device: Gpus(1, (9, 0)))
    monkeypatch.setattr(torch_backend, "CudaGpu", fail)
    with pytest.raises(ConfigError, match=message) as caught:
        load(request_for_tiny)
    assert "\n" not in str(caught.value)


def test_a_step_that_does_not_fit_says_what_to_lower(
    request_for_tiny: LoadRequest, monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu
) -> None:

    def run_out(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(torch_backend, "profile_steps", run_out)
    with pytest.raises(
        ConfigError, match=r"A step .* does not fit .* --max-num-batched-tokens or --max-num-seqs"
    ):
        load(request_for_tiny)


def test_attention_that_cannot_be_had_is_refused_before_the_weights_are_loaded(
    request_for_tiny: LoadRequest, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_facts, "_find_triton", lambda: None)
    seen: list[LoadProgress] = []
    with pytest.raises(ConfigError, match="attention is varlen, but"):
        load_engine(replace(request_for_tiny, attention="varlen"), seen.append)
    assert [progress.stage for progress in seen] == ["header"]
