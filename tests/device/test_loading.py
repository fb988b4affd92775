"""Loading a model onto a GPU: what is chosen, how the pool is sized, whether answers are those of the CPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.api import generate
from engine.config import AS_SUITS, EngineConfig
from engine.errors import ConfigError
from engine.loading import LoadedEngine, LoadRequest, load_engine
from engine.runner.cuda_runner import CudaRunner
from engine.runner.torch_facts import find_gpus
from engine.sampling_params import SamplingParams
from tests.device.machine import needs_cuda
from tests.support.tiny_server import write_tiny_model

pytestmark = needs_cuda

SHARE = 0.05
"""Of the GPU's memory: a tiny model has tiny blocks."""

POOL_BYTES = 16 << 20
"""Of a pool that is not measured."""

SLACK_BYTES = 256 << 20
"""What libraries allocate after the pool was made, and the granularity of the allocator."""

GREEDY = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
PROMPTS = ["hi", "hello there", "é", "a longer prompt that fills some blocks " * 3]


@pytest.fixture(scope="module")
def request_for_tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadRequest:
    folder: Path = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    config = EngineConfig(num_blocks=AS_SUITS, max_num_seqs=AS_SUITS, max_num_batched_tokens=AS_SUITS)
    return LoadRequest(
        model_path=folder, config=config, cache_dir=folder.parent / "cache", gpu_memory_utilization=SHARE
    )


def load(request: LoadRequest, **changes: Any) -> LoadedEngine:
    return load_engine(replace(request, **changes), lambda progress: None)


def test_torch_can_use_the_gpu() -> None:
    gpus = find_gpus()
    assert gpus.count == torch.cuda.device_count()
    assert gpus.obstacle is None


def test_without_an_option_the_gpu_serves_and_keeps_to_its_share(request_for_tiny: LoadRequest) -> None:
    torch.cuda.empty_cache()
    free_before, total = torch.cuda.mem_get_info()
    engine = load(request_for_tiny)
    config = engine.core.config
    assert (engine.info.device, engine.info.attention) == ("cuda", "triton")
    assert isinstance(engine.core.runner, CudaRunner)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (256, 8192)
    block_bytes = 2 * 2 * 2 * 16 * 16 * 2  # layers, keys and values, heads, head_dim, tokens, bytes
    assert 0.2 * SHARE * total < config.num_blocks * block_bytes <= SHARE * total
    assert len(generate(engine, PROMPTS, GREEDY)) == len(PROMPTS)
    assert engine.core.runner.num_taken > 0
    assert free_before - torch.cuda.mem_get_info()[0] <= SHARE * total + SLACK_BYTES


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"async_scheduling": False},
        {"cuda_graphs": False},
        {"attention": "reference"},
        {"swap_memory_bytes": 1 << 20},
    ],
    ids=str,
)
def test_answers_are_those_of_the_cpu(request_for_tiny: LoadRequest, changes: dict[str, Any]) -> None:
    exact = replace(request_for_tiny, dtype="fp32", kv_memory_bytes=POOL_BYTES)
    expected = generate(load(exact, device="cpu"), PROMPTS, GREEDY)
    assert generate(load(exact, **changes), PROMPTS, GREEDY) == expected


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_serves(request_for_tiny: LoadRequest, dtype: str) -> None:
    engine = load(request_for_tiny, dtype=dtype, kv_memory_bytes=POOL_BYTES)
    assert (engine.info.dtype, engine.info.kv_dtype) == (dtype, dtype)
    assert generate(engine, PROMPTS, GREEDY) == generate(engine, PROMPTS, GREEDY)


def test_a_share_that_is_too_small_is_refused_in_one_line(request_for_tiny: LoadRequest) -> None:
    with pytest.raises(ConfigError, match="use a larger --gpu-memory-utilization") as caught:
        load(request_for_tiny, gpu_memory_utilization=1e-5)
    assert "\n" not in str(caught.value)
