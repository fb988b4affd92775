"""Engines over random weights, built as loading builds them over those of a model, and runs of them.

Without a GPU a queue that is worked off late stands in for one, so that the same code runs anywhere.
"""

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bench.device.part import Clock
from bench.workload import Prompt
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder, DecoderWeights
from engine.records import StepRecord
from engine.runner.arithmetic import make_arithmetic
from engine.runner.attention_choice import REFERENCE, TRITON
from engine.runner.copier import ArrayBlocks, BlockMemory
from engine.runner.cuda_runner import CudaRunner
from engine.runner.device import CudaDevice, Device
from engine.runner.device_blocks import CudaStream, DeviceBlocks
from engine.runner.launcher import LaunchSizes
from engine.sampling_params import SamplingParams
from engine.sequence import EngineRequest


@dataclass(frozen=True)
class Way:
    """How an engine computes: attention, ahead of its scheduler or not, from CUDA graphs or not."""

    attention: str = TRITON
    computes_ahead: bool = True
    captures_graphs: bool = True

    def __str__(self) -> str:
        """Name it."""
        ahead = "run-ahead" if self.computes_ahead else "no run-ahead"
        return f"{self.attention} attention, {ahead}, {'graphs' if self.captures_graphs else 'no graphs'}"


def way_of(*, is_tiny: bool) -> Way:
    """Return the way that a GPU computes in; plain torch where nothing but the code around it is tried."""
    return Way(attention=REFERENCE) if is_tiny else Way()


def make_decoder(config: ModelConfig, weights: DecoderWeights, num_positions: int, attention: str) -> Decoder:
    """Return a decoder with a certain attention, where the weights are."""
    embedding = weights.embedding
    arithmetic = make_arithmetic(attention, config, embedding.dtype, embedding.device)
    return Decoder(config, weights, num_positions, arithmetic)


def make_device(name: str) -> Device:
    """Return the GPU, or what stands in for one."""
    if name != "cpu":
        return CudaDevice(torch.device(name, torch.cuda.current_device()))
    from tests.support.fake_device import FakeDevice  # noqa: PLC0415 - only where it is tried out

    return FakeDevice()


def make_runner(decoder: Decoder, config: EngineConfig, way: Way, device: Device) -> CudaRunner:
    """Return a runner with a KV pool and a host tier of its own; the pool holds NaN until it is written."""
    with torch.inference_mode():
        cache = decoder.make_cache(config.num_blocks, config.block_size)
        cache.storage.fill_(torch.nan)
    memory = make_memory(cache.storage, config.num_host_blocks)
    return CudaRunner(
        decoder,
        cache,
        device,
        LaunchSizes(
            config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len, config.block_size
        ),
        memory,
        eos_token_ids=frozenset(),
        computes_ahead=way.computes_ahead,
        captures_graphs=way.captures_graphs,
    )


def make_memory(storage: Tensor, num_host_blocks: int) -> BlockMemory:
    """Return a pool (layers, 2, blocks, block_size, kv_heads, head_dim) and a new host tier."""
    pool = storage.movedim(2, 0)  # (blocks, layers, 2, block_size, kv_heads, head_dim)
    if storage.is_cuda:
        return DeviceBlocks(pool, num_host_blocks, CudaStream(storage.device))
    return ArrayBlocks(pool.view(torch.uint8).numpy(), num_host_blocks)


def make_core(config: EngineConfig, runner: CudaRunner) -> EngineCore:
    """Return an engine that begins with nothing, over a runner that another one may have used before."""
    runner.reset()
    return EngineCore(config, runner)


@dataclass
class Run:
    """What an engine did: its records, how long each step took, and the tokens of each request."""

    records: list[StepRecord] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    answers: dict[str, list[int]] = field(default_factory=dict)
    is_complete: bool = False

    @property
    def seconds(self) -> float:
        """From the first step to the end of the last one."""
        return sum(self.step_s)

    @property
    def num_tokens(self) -> int:
        """Tokens that were generated."""
        return sum(map(len, self.answers.values()))


def drive(core: EngineCore, prompts: list[Prompt], clock: Clock | None = None) -> Run:
    """Run prompts together, greedily and to their length; stop between steps when the time is over."""
    run = Run()
    for number, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=prompt.num_new, temperature=0.0, ignore_eos=True)
        request = EngineRequest(
            request_id=str(number), prompt_token_ids=prompt.token_ids, sampling_params=params
        )
        core.add_request(request)
        run.answers[request.request_id] = []
    while core.has_work and (clock is None or clock.left_s > 0):
        started_s = time.perf_counter()
        result = core.step()
        run.step_s.append(time.perf_counter() - started_s)
        run.records.append(result.record)
        for output in result.outputs:
            if output.token_id >= 0:
                run.answers[output.request_id].append(output.token_id)
    run.is_complete = not core.has_work
    for number in range(len(prompts)):
        core.abort(str(number))
    return run
