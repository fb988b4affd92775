"""The torch path on CUDA: against float64 arithmetic, and against the CPU."""

import math
import random
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.model.attention import AttentionBatch, paged_attention
from engine.model.sampler import Draw, sample
from engine.records import Loaded
from engine.runner.batch import BatchLayout, make_batch
from engine.runner.device_blocks import CudaStream, DeviceBlocks
from engine.runner.torch_runner import TorchRunner
from engine.sampling_params import SamplingParams
from engine.scheduling.output import ScheduledSequence
from engine.sequence import EngineRequest, Sequence
from tests.support.models import VARIANTS, VOCAB_SIZE, load_decoder, make_reference, write_folder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

BLOCK_SIZE, NUM_BLOCKS, HEADS, KV_HEADS, HEAD_DIM = 16, 128, 9, 3, 64
CUDA = torch.device("cuda")


def make_share(num_tokens: int, computed: int, blocks: list[int]) -> ScheduledSequence:
    request = EngineRequest(
        request_id="r", prompt_token_ids=[0] * num_tokens, sampling_params=SamplingParams()
    )
    sequence = Sequence(0, request, max_tokens=1)
    sequence.block_table = [blocks.pop() for _ in range(-(-num_tokens // BLOCK_SIZE))]
    return ScheduledSequence(sequence, computed, num_tokens - computed)


def attend_in_float64(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first_position: int
) -> torch.Tensor:
    """Return attention of query rows at first_position, first_position + 1, ... over all keys before them."""
    rows = []
    for row in range(query.shape[0]):
        length = first_position + row + 1
        repeat = HEADS // KV_HEADS
        key = keys[:length].double().repeat_interleave(repeat, 1)
        value = values[:length].double().repeat_interleave(repeat, 1)
        scores = torch.einsum("hd,lhd->hl", query[row].double(), key) / math.sqrt(HEAD_DIM)
        rows.append(torch.einsum("hl,lhd->hd", scores.softmax(-1), value))
    return torch.stack(rows).flatten(1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
@torch.inference_mode()
def test_paged_attention_equals_float64(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    blocks = random.Random(0).sample(range(NUM_BLOCKS), NUM_BLOCKS)
    shares = [
        make_share(num_tokens, computed, blocks)
        for num_tokens, computed in [(1, 0), (17, 16), (300, 299), (64, 0), (129, 100), (40, 39), (200, 50)]
    ]
    layout = BatchLayout(BLOCK_SIZE, KV_HEADS * HEAD_DIM * dtype.itemsize, CUDA, dtype)
    batch = make_batch(shares, layout)
    cache = torch.full((2, NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM), torch.nan, dtype=dtype, device=CUDA)
    contexts = []
    for share in shares:
        kv = torch.randn(2, share.sequence.num_tokens, KV_HEADS, HEAD_DIM, device=CUDA).to(dtype)
        contexts.append(kv)
        for position in range(share.num_computed_tokens):
            block = share.sequence.block_table[position // BLOCK_SIZE]
            cache[:, block, position % BLOCK_SIZE] = kv[:, position]
    starts = row_starts(batch.attention, shares)
    num_tokens = sum(share.num_scheduled_tokens for share in shares)
    query = torch.randn(num_tokens, HEADS, HEAD_DIM, device=CUDA).to(dtype)
    key = torch.empty(num_tokens, KV_HEADS, HEAD_DIM, dtype=dtype, device=CUDA)
    value = torch.empty_like(key)
    for share, start, kv in zip(shares, starts, contexts, strict=True):
        rows = slice(start, start + share.num_scheduled_tokens)
        key[rows], value[rows] = kv[:, share.num_computed_tokens :]
    attended = paged_attention(query, key, value, (cache[0], cache[1]), batch.attention)
    for share, start, kv in zip(shares, starts, contexts, strict=True):
        rows = slice(start, start + share.num_scheduled_tokens)
        expected = attend_in_float64(query[rows], kv[0], kv[1], share.num_computed_tokens)
        torch.testing.assert_close(attended[rows].double(), expected, atol=tolerance, rtol=tolerance)


def row_starts(batch: AttentionBatch, shares: list[ScheduledSequence]) -> list[int]:
    """Return the first row of each share, found by the slot that its first token is written to."""
    slots = batch.slot_mapping.tolist()
    return [
        slots.index(
            share.sequence.block_table[share.num_computed_tokens // BLOCK_SIZE] * BLOCK_SIZE
            + share.num_computed_tokens % BLOCK_SIZE
        )
        for share in shares
    ]


def generate(
    folder: Path, device: str, dtype: torch.dtype, num_host_blocks: int = 0
) -> tuple[list[list[int]], int]:
    """Return the answers to twelve requests in a tight pool, and how many loads there were."""
    decoder = load_decoder(folder, dtype, device)
    config = EngineConfig(
        num_blocks=24,
        block_size=8,
        max_num_seqs=6,
        max_num_batched_tokens=48,
        max_model_len=128,
        num_host_blocks=num_host_blocks,
    )
    runner = TorchRunner(
        decoder,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        eos_token_ids=frozenset(),
        num_host_blocks=num_host_blocks,
    )
    core, num_loads = EngineCore(config, runner), 0
    rng = random.Random(3)
    for index in range(12):
        prompt = rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 60))
        params = SamplingParams(max_tokens=24, temperature=0.0)
        core.add_request(
            EngineRequest(request_id=str(index), prompt_token_ids=prompt, sampling_params=params)
        )
    answers: list[list[int]] = [[] for _ in range(12)]
    while core.has_work:
        result = core.step()
        num_loads += sum(isinstance(event, Loaded) for event in result.record.events)
        for output in result.outputs:
            answers[int(output.request_id)].append(output.token_id)
    core.check_integrity()
    return answers, num_loads


@pytest.mark.parametrize("variant", ["llama tied", "qwen2 with biases", "qwen3 with q/k norms"])
def test_greedy_answers_equal_those_of_the_cpu(variant: str, tmp_path: Path) -> None:
    folder = write_folder(make_reference(VARIANTS[variant]), tmp_path / "model")
    assert generate(folder, "cuda", torch.float32)[0] == generate(folder, "cpu", torch.float32)[0]


def test_bfloat16_answers_on_cuda_do_not_change_between_runs(tmp_path: Path) -> None:
    folder = write_folder(make_reference(VARIANTS["llama tied"]), tmp_path / "model")
    first, second = (generate(folder, "cuda", torch.bfloat16)[0] for _ in range(2))
    assert first == second
    assert all(len(answer) == 24 for answer in first)


def test_draws_on_cuda_equal_those_on_the_cpu() -> None:
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(1)) * 3
    draws = [
        Draw(SamplingParams(temperature=1.0, top_k=40 * (i % 2), top_p=0.9, seed=i), 0, i) for i in range(64)
    ]
    assert sample(logits.to(CUDA), draws) == sample(logits, draws)


def test_greedy_answers_are_the_same_with_a_host_tier_in_pinned_memory(tmp_path: Path) -> None:
    folder = write_folder(make_reference(VARIANTS["llama tied"]), tmp_path / "model")
    expected, _ = generate(folder, "cpu", torch.float32)
    answers, num_loads = generate(folder, "cuda", torch.float32, num_host_blocks=64)
    assert num_loads > 0
    assert answers == expected


def test_blocks_are_copied_whole_through_pinned_memory() -> None:
    storage = torch.randn(3, 2, 8, 500, device=CUDA)  # (layers, 2, blocks, numbers)
    before = storage.clone()
    torch.cuda.synchronize()
    memory = DeviceBlocks(storage.movedim(2, 0), 4, CudaStream(CUDA))
    assert memory._host.is_pinned()
    memory.copy_out(5, 3)
    memory.copy_in(3, 2)
    assert torch.equal(storage[:, :, 2], before[:, :, 5])
    others = [block for block in range(8) if block != 2]
    assert torch.equal(storage[:, :, others], before[:, :, others])
