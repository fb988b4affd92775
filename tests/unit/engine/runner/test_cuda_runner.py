"""The CUDA runner's logic on a device that does everything late: answers, run-ahead, graphs, memory."""

from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.model.decoder import Arithmetic, Decoder
from engine.records import Preempted
from engine.runner.copier import ArrayBlocks
from engine.runner.cuda_runner import CudaRunner
from engine.runner.launcher import LaunchSizes
from engine.runner.torch_runner import TorchRunner
from tests.support.engine_runs import NUM_TOKENS, count_host_events, make_requests, run
from tests.support.fake_device import FakeDevice
from tests.support.models import VARIANTS, load_decoder, make_reference, write_folder
from tests.support.padded_attention import PaddedAttention

BLOCK_SIZE = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_folder(make_reference(VARIANTS["llama tied"]), tmp_path_factory.mktemp("model"))


def make_config(num_blocks: int, num_host_blocks: int = 0) -> EngineConfig:
    return EngineConfig(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=8,
        max_num_batched_tokens=40,
        max_model_len=96,
        num_host_blocks=num_host_blocks,
    )


def make_runner(decoder: Decoder, config: EngineConfig, *, computes_ahead: bool = True) -> CudaRunner:
    cache = decoder.make_cache(config.num_blocks, config.block_size)
    cache.storage.fill_(torch.nan)
    pool = cache.storage.movedim(2, 0).view(torch.uint8).numpy()
    sizes = LaunchSizes(
        config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len, config.block_size
    )
    return CudaRunner(
        decoder,
        cache,
        FakeDevice(),
        sizes,
        ArrayBlocks(pool, config.num_host_blocks),
        eos_token_ids=frozenset(),
        computes_ahead=computes_ahead,
    )


def expected_answers(folder: Path, seed: int) -> dict[str, list[int]]:
    runner = TorchRunner(
        load_decoder(folder), num_blocks=256, block_size=BLOCK_SIZE, eos_token_ids=frozenset()
    )
    return run(EngineCore(make_config(256), runner), make_requests(seed))[0]


def load_captured(folder: Path) -> Decoder:
    plain = load_decoder(folder)
    return Decoder(plain.config, plain._weights, 96, Arithmetic(PaddedAttention()))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("attention", ["captured", "reference"])
@pytest.mark.parametrize("computes_ahead", [True, False])
def test_answers_are_those_of_the_torch_runner(
    folder: Path, seed: int, attention: str, computes_ahead: bool
) -> None:
    decoder = load_captured(folder) if attention == "captured" else load_decoder(folder)
    config = make_config(num_blocks=20)
    runner = make_runner(decoder, config, computes_ahead=computes_ahead)
    answers, results = run(EngineCore(config, runner), make_requests(seed))
    assert answers == expected_answers(folder, seed)
    assert any(isinstance(event, Preempted) for result in results for event in result.record.events)
    assert any(output.num_cached_tokens for result in results for output in result.outputs)
    assert (runner.num_taken > 100) == computes_ahead
    assert (runner.num_dropped > 0) == computes_ahead
    assert bool(runner._device.graphs) == (attention == "captured")


@pytest.mark.parametrize("seed", range(3))
def test_answers_are_the_same_with_a_host_tier(folder: Path, seed: int) -> None:
    config = make_config(num_blocks=20, num_host_blocks=40)
    runner = make_runner(load_captured(folder), config)
    answers, results = run(EngineCore(config, runner), make_requests(seed))
    assert answers == expected_answers(folder, seed)
    counts = count_host_events(results)
    assert counts["loads"] > 0
    assert counts["copies out"] > 0
    assert runner.num_taken > 50
    assert all(len(answer) == NUM_TOKENS for answer in answers.values())
