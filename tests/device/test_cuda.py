"""The torch path on CUDA: against float64 arithmetic, and against the CPU."""

import random
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.model.reference_attention import ReferenceAttention
from engine.model.sampler import Draw, sample
from engine.runner.device_blocks import CudaStream, DeviceBlocks
from engine.runner.torch_runner import TorchRunner
from engine.sampling_params import SamplingParams
from engine.sequence import EngineRequest
from tests.device.machine import DEVICE, NAME, needs_cuda, needs_device
from tests.support.attention_reference import TOLERANCE, AttentionShape, make_case
from tests.support.engine_runs import count_host_events, run
from tests.support.models import VARIANTS, VOCAB_SIZE, load_decoder, make_reference, write_folder

pytestmark = needs_device

SHAPE = AttentionShape(head_dim=64, group=3, num_kv_heads=3)
SEQUENCES = [(1, 1), (17, 1), (40, 1), (300, 1), (64, 64), (129, 29), (200, 150)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_reference_attention_equals_float64(dtype: torch.dtype) -> None:
    case = make_case(SHAPE, SEQUENCES, dtype, DEVICE)
    bytes_per_token = SHAPE.num_kv_heads * SHAPE.head_dim * dtype.itemsize
    attention = ReferenceAttention(DEVICE, dtype, bytes_per_token)
    case.batch.plan = attention.plan(case.inputs, case.batch)
    attended = attention.attend(case.query, case.new, case.cache, case.batch)
    tolerance = 2 * TOLERANCE[dtype]  # torch chooses among several ways to multiply
    torch.testing.assert_close(attended.double(), case.expected(), atol=tolerance, rtol=tolerance)


def make_requests() -> list[EngineRequest]:
    rng = random.Random(3)
    params = SamplingParams(max_tokens=24, temperature=0.0)
    return [
        EngineRequest(
            request_id=str(index),
            prompt_token_ids=rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 60)),
            sampling_params=params,
        )
        for index in range(12)
    ]


def generate(
    folder: Path, device: str, dtype: torch.dtype, num_host_blocks: int = 0
) -> tuple[dict[str, list[int]], int]:
    """Return the answers to twelve requests in a tight pool, and how many loads there were."""
    config = EngineConfig(
        num_blocks=24,
        block_size=8,
        max_num_seqs=6,
        max_num_batched_tokens=48,
        max_model_len=128,
        num_host_blocks=num_host_blocks,
    )
    runner = TorchRunner(
        load_decoder(folder, dtype, device),
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        eos_token_ids=frozenset(),
        num_host_blocks=num_host_blocks,
    )
    answers, results = run(EngineCore(config, runner), make_requests())
    return answers, count_host_events(results)["loads"]


@pytest.mark.parametrize("variant", ["llama tied", "qwen2 with biases", "qwen3 with q/k norms"])
def test_greedy_answers_equal_those_of_the_cpu(variant: str, tmp_path: Path) -> None:
    folder = write_folder(make_reference(VARIANTS[variant]), tmp_path / "model")
    assert generate(folder, NAME, torch.float32)[0] == generate(folder, "cpu", torch.float32)[0]


def test_bfloat16_answers_do_not_change_between_runs(tmp_path: Path) -> None:
    folder = write_folder(make_reference(VARIANTS["llama tied"]), tmp_path / "model")
    first, second = (generate(folder, NAME, torch.bfloat16)[0] for _ in range(2))
    assert first == second
    assert all(len(answer) == 24 for answer in first.values())


def test_greedy_answers_are_the_same_with_a_host_tier(tmp_path: Path) -> None:
    folder = write_folder(make_reference(VARIANTS["llama tied"]), tmp_path / "model")
    expected, _ = generate(folder, "cpu", torch.float32)
    answers, num_loads = generate(folder, NAME, torch.float32, num_host_blocks=64)
    assert num_loads > 0
    assert answers == expected


def test_draws_equal_those_of_the_cpu() -> None:
    logits = torch.randn(96, 1000, generator=torch.Generator().manual_seed(1)) * 3
    settings = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 40},
        {"temperature": 1.3, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 40, "top_p": 0.5},
        {"temperature": 2.0, "top_p": 0.999},  # of more tokens than the candidates that are looked at
    ]
    draws = [Draw(SamplingParams(**settings[i % 6], seed=i), i % 2, i) for i in range(96)]  # type: ignore[arg-type]
    assert sample(logits.to(DEVICE), draws) == sample(logits, draws)


@needs_cuda
def test_blocks_are_copied_whole_through_pinned_memory() -> None:
    storage = torch.randn(3, 2, 8, 500, device=DEVICE)  # (layers, 2, blocks, numbers)
    before = storage.clone()
    torch.cuda.synchronize()
    memory = DeviceBlocks(storage.movedim(2, 0), 4, CudaStream(DEVICE))
    assert memory.host_block(3).is_pinned()
    memory.copy_out(5, 3)
    memory.copy_in(3, 2)
    assert torch.equal(storage[:, :, 2], before[:, :, 5])
    others = [block for block in range(8) if block != 2]
    assert torch.equal(storage[:, :, others], before[:, :, others])
