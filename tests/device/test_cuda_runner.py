"""The CUDA runner on CUDA: every way to compute gives the answers that the CPU gives in plain torch."""

from pathlib import Path

import pytest
import torch

from bench.device.engines import Way, make_core, make_device, make_runner
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.model.decoder import Decoder
from engine.records import Preempted, StepResult
from engine.runner.arithmetic import make_arithmetic
from engine.runner.attention_choice import REFERENCE, TRITON
from engine.runner.cuda_runner import CudaRunner
from engine.runner.torch_runner import TorchRunner
from engine.sampling_params import SamplingParams
from engine.sequence import EngineRequest
from tests.device.machine import DEVICE, IS_TRIED, NAME, needs_cuda, needs_device
from tests.support.engine_runs import NUM_TOKENS, count_host_events, make_requests, run
from tests.support.models import VARIANTS, VOCAB_SIZE, load_decoder, make_reference, write_folder

pytestmark = needs_device

BLOCK_SIZE, MAX_LEN = 8, 96
LLAMA, QWEN2, QWEN3 = "llama tied", "qwen2 with biases", "qwen3 with q/k norms"
WAYS = [
    Way(attention, computes_ahead=ahead, captures_graphs=graphs)
    for attention in (TRITON, REFERENCE)
    for ahead in (True, False)
    for graphs in (True, False)
    if attention == TRITON or not graphs
]
USUAL = WAYS[0]
KNOWN: dict[tuple[Path, str], dict[str, list[int]]] = {}
RUNS = [(LLAMA, way, 0) for way in WAYS]
RUNS += [
    (LLAMA, USUAL, 1),
    (LLAMA, USUAL, 2),
    (QWEN2, USUAL, 0),
    (QWEN2, USUAL, 1),
    (QWEN3, USUAL, 0),
    (QWEN3, USUAL, 1),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        variant: write_folder(make_reference(VARIANTS[variant]), folder / str(number))
        for number, variant in enumerate((LLAMA, QWEN2, QWEN3))
    }


@pytest.fixture
def folder(folders: dict[str, Path]) -> Path:
    return folders[LLAMA]


def make_config(num_blocks: int, num_host_blocks: int = 0) -> EngineConfig:
    return EngineConfig(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=8,
        max_num_batched_tokens=40,
        max_model_len=MAX_LEN,
        num_host_blocks=num_host_blocks,
    )


def load(folder: Path, way: Way, dtype: torch.dtype = torch.float32) -> Decoder:
    plain = load_decoder(folder, dtype, NAME)
    with torch.inference_mode():
        arithmetic = make_arithmetic(way.attention, plain.config, dtype, DEVICE)
        return Decoder(plain.config, plain._weights, MAX_LEN, arithmetic)


def build(folder: Path, way: Way, config: EngineConfig, dtype: torch.dtype = torch.float32) -> CudaRunner:
    return make_runner(load(folder, way, dtype), config, way, make_device(NAME))


def pick(seed: int) -> list[EngineRequest]:
    """Return requests; few where they are only tried."""
    return make_requests(seed)[: 3 if IS_TRIED else None]


def expect(folder: Path, requests: list[EngineRequest]) -> dict[str, list[int]]:
    """Return the answers of the CPU in plain torch, in a pool with room for all, once for each of both."""
    key = (folder, str(requests))
    if key not in KNOWN:
        KNOWN[key] = expect_anew(folder, requests)
    return KNOWN[key]


def expect_anew(folder: Path, requests: list[EngineRequest]) -> dict[str, list[int]]:
    decoder = load_decoder(folder)
    runner = TorchRunner(decoder, num_blocks=256, block_size=BLOCK_SIZE, eos_token_ids=frozenset())
    return run(EngineCore(make_config(256), runner), requests)[0]


def has_preempted(results: list[StepResult]) -> bool:
    return any(isinstance(event, Preempted) for result in results for event in result.record.events)


@pytest.mark.parametrize(("variant", "way", "seed"), RUNS[:1] if IS_TRIED else RUNS, ids=str)
def test_answers_are_those_of_the_cpu_under_preemption_and_with_shared_prefixes(
    folders: dict[str, Path], variant: str, way: Way, seed: int
) -> None:
    folder = folders[variant]
    config = make_config(num_blocks=14 if IS_TRIED else 20)
    runner = build(folder, way, config)
    requests = pick(seed)
    answers, results = run(EngineCore(config, runner), requests)
    assert answers == expect(folder, requests)
    assert has_preempted(results)
    assert any(output.num_cached_tokens for result in results for output in result.outputs)
    assert (runner.num_taken > 20) == way.computes_ahead
    graphs = runner._launcher._graphs._graphs
    assert bool(graphs) == (way.captures_graphs and way.attention == TRITON)


@pytest.mark.skipif(IS_TRIED, reason="too slow")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("attention", [TRITON, REFERENCE])
def test_answers_are_the_same_with_a_host_tier(folder: Path, attention: str, seed: int) -> None:
    config = make_config(num_blocks=20, num_host_blocks=40)
    runner = build(folder, Way(attention, captures_graphs=attention == TRITON), config)
    answers, results = run(EngineCore(config, runner), make_requests(seed))
    assert answers == expect(folder, make_requests(seed))
    counts = count_host_events(results)
    assert counts["loads"] > 0
    assert counts["copies out"] > 0
    assert all(len(answer) == NUM_TOKENS for answer in answers.values())


@pytest.mark.skipif(IS_TRIED, reason="Triton's interpreter does not multiply bfloat16")
def test_bfloat16_answers_are_the_same_each_time_whatever_the_pool_held(folder: Path) -> None:
    config, found = make_config(num_blocks=64), []
    for filling in (torch.nan, torch.nan, 0.0):
        runner = build(folder, Way(), config, torch.bfloat16)
        runner._launcher._cache.storage.fill_(filling)
        found.append(run(EngineCore(config, runner), make_requests(1))[0])
    assert found[1] == found[0]
    assert found[2] == found[0]


def test_an_engine_goes_on_after_a_failed_step_and_a_reset(folder: Path) -> None:
    config = make_config(num_blocks=24)
    runner = build(folder, Way(), config)
    requests = pick(2)
    core = EngineCore(config, runner)
    core.add_requests(requests)
    for _ in range(6):
        core.step()
    core.fail_all("injected")
    core.reset_runner()
    assert run(make_core(config, runner), requests)[0] == expect(folder, requests)


@needs_cuda
def test_steps_do_not_wait_for_the_device(folder: Path) -> None:
    config = make_config(num_blocks=64)
    runner = build(folder, Way(), config)
    requests = make_requests(0)
    expected = run(EngineCore(config, runner), requests)[0]  # compiles kernels, captures graphs
    core = make_core(config, runner)
    core.add_requests(requests)
    answers: dict[str, list[int]] = {request.request_id: [] for request in requests}
    torch.cuda.set_sync_debug_mode("error")  # raises where torch waits without being told to
    try:
        while core.has_work:
            for output in core.step().outputs:
                answers[output.request_id].append(output.token_id)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert answers == expected


@needs_cuda
def test_a_token_that_the_candidates_do_not_decide_is_found(folder: Path) -> None:
    wide = SamplingParams(max_tokens=12, temperature=2.0, top_p=0.9999, seed=4)
    prompts = [[5, 9, index] for index in range(8)]
    requests = [
        EngineRequest(request_id=str(index), prompt_token_ids=prompt, sampling_params=wide)
        for index, prompt in enumerate(prompts)
    ]
    config = make_config(num_blocks=64)
    assert VOCAB_SIZE > 256
    assert run(EngineCore(config, build(folder, Way(), config)), requests)[0] == expect(folder, requests)
