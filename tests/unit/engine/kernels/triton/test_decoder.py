"""A whole decoder on the kernels against one in plain torch, and the CUDA runner with it."""

import random
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.kernels.triton.attention import TritonAttention
from engine.kernels.triton.ops import TritonOps
from engine.model.decoder import Arithmetic, Decoder
from engine.runner.batch import make_inputs
from engine.runner.copier import ArrayBlocks
from engine.runner.cuda_runner import CudaRunner
from engine.runner.launcher import LaunchSizes
from engine.runner.torch_runner import TorchRunner
from engine.sampling_params import SamplingParams
from engine.scheduling.output import ScheduledSequence
from engine.sequence import EngineRequest, Sequence
from tests.support.engine_runs import run
from tests.support.fake_device import FakeDevice
from tests.support.models import VARIANTS, VOCAB_SIZE, Variant, load_decoder, make_reference, write_folder

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 4, 64, 96


def with_kernels(plain: Decoder) -> Decoder:
    return Decoder(plain.config, plain._weights, MAX_LEN, Arithmetic(TritonAttention(), TritonOps()))


def make_shares(rng: random.Random) -> list[list[ScheduledSequence]]:
    """Return steps that compute some sequences from begin to end, in chunks and single tokens."""
    blocks = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    sequences = []
    for num_tokens in (1, 2, 9, 19):
        request = EngineRequest(
            request_id="r",
            prompt_token_ids=rng.choices(range(VOCAB_SIZE), k=num_tokens),
            sampling_params=SamplingParams(),
        )
        sequences.append(Sequence(0, request, max_tokens=1))
        sequences[-1].block_table = [blocks.pop() for _ in range(-(-num_tokens // BLOCK_SIZE))]
    computed = [0] * len(sequences)
    steps = []
    while any(sequence.num_tokens > done for sequence, done in zip(sequences, computed, strict=True)):
        shares = []
        for index, sequence in enumerate(sequences):
            count = min(rng.choice([0, 1, 2, 9]), sequence.num_tokens - computed[index])
            if count:
                shares.append(ScheduledSequence(sequence, computed[index], count))
                computed[index] += count
        if shares:
            steps.append(shares)
    return steps


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_logits_and_cache_equal_those_of_plain_torch(variant: str, tmp_path: Path, device: str) -> None:
    plain = load_decoder(write_folder(make_reference(VARIANTS[variant]), tmp_path / "model"), device=device)
    decoders = (with_kernels(plain), plain)
    caches = [decoder.make_cache(NUM_BLOCKS, BLOCK_SIZE) for decoder in decoders]
    for cache in caches:
        cache.storage.fill_(torch.nan)
    kinds = set()
    for shares in make_shares(random.Random(0)):
        inputs = make_inputs(shares, BLOCK_SIZE)
        found, expected = (
            decoder.forward(decoder.make_batch(inputs), cache)
            for decoder, cache in zip(decoders, caches, strict=True)
        )
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        kinds.add((inputs.num_decodes > 0, inputs.num_decodes < inputs.num_sequences))
    assert (True, True) in kinds
    found, expected = (cache.storage for cache in caches)
    assert torch.equal(found.isnan(), expected.isnan())
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5, equal_nan=True)


def make_requests() -> list[EngineRequest]:
    """Return three that begin alike: greedy, drawn, and with a prompt of two chunks."""
    prefix = random.Random(1).choices(range(VOCAB_SIZE), k=9)
    return [
        EngineRequest(
            request_id=str(index),
            prompt_token_ids=[*prefix, *range(index, index + num_more)],
            sampling_params=SamplingParams(max_tokens=10, temperature=temperature, seed=3),
        )
        for index, (num_more, temperature) in enumerate([(1, 0.0), (5, 1.0), (25, 0.0)])
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device that stands in for a GPU is the CPU")
def test_the_cuda_runner_answers_on_the_kernels_as_the_torch_runner_does(tmp_path: Path) -> None:
    variant = Variant("qwen3", {"head_dim": 32, "num_hidden_layers": 1})
    plain = load_decoder(write_folder(make_reference(variant), tmp_path / "model"))
    config = EngineConfig(
        num_blocks=24, block_size=8, max_num_seqs=4, max_num_batched_tokens=24, max_model_len=MAX_LEN
    )
    requests = make_requests()
    torch_runner = TorchRunner(plain, num_blocks=24, block_size=8, eos_token_ids=frozenset())
    expected, _ = run(EngineCore(config, torch_runner), requests)
    decoder, device = with_kernels(plain), FakeDevice()
    cache = decoder.make_cache(config.num_blocks, config.block_size)
    cache.storage.fill_(torch.nan)
    pool = cache.storage.movedim(2, 0).view(torch.uint8).numpy()
    sizes = LaunchSizes(4, 24, MAX_LEN, 8)
    runner = CudaRunner(decoder, cache, device, sizes, ArrayBlocks(pool, 0), eos_token_ids=frozenset())
    answers, _ = run(EngineCore(config, runner), requests)
    assert answers == expected
    assert sum(graph.num_replays for graph in device.graphs) > 5
