"""A GPU without memory for a step: the step is computed in parts, or fails alone; the engine lives."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bench.device.engines import Way, drive, make_core, make_decoder, make_device, make_runner
from bench.device.shapes import LLAMA_32_1B, Maker, decoder_weights, make_tensors
from bench.workload import Prompt
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.model.config import ModelConfig
from engine.records import FAILED_TOKEN_ID, Finished
from engine.runner.cuda_runner import CudaRunner
from engine.runner.device import CudaDevice
from engine.sampling_params import SamplingParams
from engine.sequence import EngineRequest
from tests.device.machine import DEVICE, needs_cuda

pytestmark = needs_cuda

WIDE: ModelConfig = replace(
    LLAMA_32_1B,
    hidden_size=256,
    intermediate_size=16_384,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=512,
    max_position=4096,
)
"""Gate, up and their product take 192 KiB a token in float32, everything else next to nothing."""

CONFIG = EngineConfig(
    num_blocks=512, block_size=16, max_num_seqs=4, max_num_batched_tokens=2048, max_model_len=2048
)
PROMPTS = [Prompt([(7 * i + p) % 512 for p in range(900)], 6) for i in range(4)]
MIB = 1 << 20


@pytest.fixture
def runner() -> CudaRunner:
    with torch.inference_mode():
        weights = decoder_weights(WIDE, make_tensors(WIDE, Maker(DEVICE, torch.float32)))
        decoder = make_decoder(WIDE, weights, CONFIG.max_model_len, Way().attention)
    made = make_runner(decoder, CONFIG, Way(), make_device("cuda"))
    warm = [Prompt([1, 2, 3 + i], 4) for i in range(4)]
    drive(make_core(CONFIG, made), warm)  # kernels, workspaces and graphs take their memory now
    return made


@contextmanager
def capped(extra_bytes: int) -> Iterator[None]:
    """Let this process take so many bytes of the GPU beside what it holds now."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total_bytes = torch.cuda.get_device_properties(DEVICE).total_memory
    limit = (torch.cuda.memory_reserved(DEVICE) + extra_bytes) / total_bytes
    torch.cuda.set_per_process_memory_fraction(limit, DEVICE)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)


def test_a_step_that_needs_too_much_is_computed_in_parts(
    runner: CudaRunner, caplog: pytest.LogCaptureFixture
) -> None:
    expected = drive(make_core(CONFIG, runner), PROMPTS).answers
    with caplog.at_level(logging.WARNING), capped(128 * MIB):
        answers = drive(make_core(CONFIG, runner), PROMPTS).answers
    assert "more memory than the GPU has left" in caplog.text
    assert answers == expected
    assert all(len(answer) == 6 for answer in answers.values())


def test_requests_end_where_nothing_is_left_and_later_ones_are_served(runner: CudaRunner) -> None:
    expected = drive(make_core(CONFIG, runner), PROMPTS).answers
    core = make_core(CONFIG, runner)
    with capped(0):
        finished = run_to_end(core, PROMPTS)
    # Even then some tokens may find room in what torch holds: some requests fail, others take long.
    assert len(finished) == 4
    assert set(finished.values()) <= {"error", "length"}
    core.check_integrity()
    assert drive(core, PROMPTS).answers == expected


def run_to_end(core: EngineCore, prompts: list[Prompt]) -> dict[int, str]:
    """Return why each sequence ended."""
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        core.add_request(
            EngineRequest(
                request_id=f"capped {number}", prompt_token_ids=prompt.token_ids, sampling_params=params
            )
        )
    finished: dict[int, str] = {}
    while core.has_work:
        result = core.step()
        assert all(output.token_id != FAILED_TOKEN_ID for output in result.outputs)
        for event in result.record.events:
            if isinstance(event, Finished):
                finished[event.seq_id] = event.reason
    return finished


class GreedyDevice(CudaDevice):
    """Its captures ask for more memory than there is, in one of the two times that the work is done."""

    def __init__(self, device: torch.device, failing_call: int) -> None:
        super().__init__(device)
        self._failing_call = failing_call

    def capture(self, work: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        calls = iter(range(2))

        def greedy_work() -> Tensor:
            result = work()
            if next(calls) == self._failing_call:
                torch.empty(1 << 46, dtype=torch.uint8, device=self.torch_device)  # 64 TiB
            return result

        return super().capture(greedy_work)


@pytest.mark.parametrize("failing_call", [0, 1], ids=["on the way", "while capturing"])
def test_decoding_goes_on_without_graphs_when_there_is_no_memory_to_capture_one(
    failing_call: int, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.inference_mode():
        weights = decoder_weights(WIDE, make_tensors(WIDE, Maker(DEVICE, torch.float32)))
        decoder = make_decoder(WIDE, weights, CONFIG.max_model_len, Way().attention)
    way = Way(captures_graphs=False)
    expected = drive(make_core(CONFIG, make_runner(decoder, CONFIG, way, make_device("cuda"))), PROMPTS)
    runner = make_runner(decoder, CONFIG, Way(), GreedyDevice(DEVICE, failing_call))
    with caplog.at_level(logging.WARNING):
        answers = drive(make_core(CONFIG, runner), PROMPTS).answers
    assert "No memory for a CUDA graph" in caplog.text
    assert answers == expected.answers
