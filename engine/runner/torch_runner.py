"""Runs a decoder in plain torch, on the CPU or on CUDA: the oracle and the fallback of faster runners."""

import logging
import time

import torch
from torch import Tensor

from engine.model.decoder import Decoder
from engine.model.sampler import Draw, sample
from engine.records import FAILED_TOKEN_ID
from engine.runner.base import LocalRunner, ModelRunnerOutput
from engine.runner.batch import make_inputs
from engine.runner.copier import ArrayBlocks, BlockCopier, BlockMemory
from engine.runner.device_blocks import CudaStream, DeviceBlocks
from engine.runner.shares import share_of
from engine.runner.smaller_steps import compute_smaller, is_out_of_memory
from engine.runner.warm_up import warm_up
from engine.scheduling.output import ScheduledSequence, SchedulerOutput

logger = logging.getLogger(__name__)


class TorchRunner(LocalRunner):
    """A `ModelRunner` over a `Decoder` and its KV pool. Owned by one thread."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        num_blocks: int,
        block_size: int,
        eos_token_ids: frozenset[int],
        num_host_blocks: int = 0,
    ) -> None:
        """Allocate KV pool and host tier; raises `RuntimeError` (torch's) when memory does not suffice."""
        self.vocab_size = decoder.config.vocab_size
        self.eos_token_ids = eos_token_ids
        self._decoder = decoder
        self._cache = decoder.make_cache(num_blocks, block_size)
        self.device = decoder.device
        self._block_size = block_size
        self.copier = BlockCopier(_make_memory(self._cache.storage, num_host_blocks), block_size)

    @torch.inference_mode()
    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute all scheduled tokens, write their KV, sample where `needs_sampling`.

        Copies run beside that; raises `RuntimeError` if one fails.
        """
        self.copier.begin(scheduler_output)
        token_ids, forward_ns, sample_ns = self._compute(scheduler_output.scheduled)
        finished_loads = self.copier.finish(scheduler_output.awaited_loads)
        return ModelRunnerOutput(token_ids, forward_ns, sample_ns, finished_loads)

    def _compute(self, scheduled: list[ScheduledSequence]) -> tuple[list[int], int, int]:
        """Return the tokens, and how long the model and the sampling took."""
        if not scheduled:
            return [], 0, 0
        started = time.perf_counter_ns()
        try:
            return self._compute_whole(scheduled)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            logger.warning(
                "A step of %d sequences needs more memory than there is; in parts (%s)", len(scheduled), error
            )
        # Out here, where the error does not hold on to what the step had allocated.
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        token_ids = compute_smaller(scheduled, lambda part: self._compute_whole(part)[0])
        return token_ids, time.perf_counter_ns() - started, 0

    def _compute_whole(self, scheduled: list[ScheduledSequence]) -> tuple[list[int], int, int]:
        """Do what `_compute` does, in one go; raises torch's or Python's error if memory does not suffice."""
        started = time.perf_counter_ns()
        batch = self._decoder.make_batch(make_inputs(scheduled, self._block_size))
        logits = self._decoder.forward(batch, self._cache)
        if logits.is_cuda:
            # Durations would otherwise be those of the launches, and copies need all KV to be there.
            torch.cuda.current_stream(logits.device).synchronize()
        computed = time.perf_counter_ns()
        wanted = [entry for entry in scheduled if entry.needs_sampling]
        sampled = iter(_sample_rows(logits, [share_of(entry).make_draw() for entry in wanted]))
        token_ids = [next(sampled) if entry.needs_sampling else -1 for entry in scheduled]
        return token_ids, computed - started, time.perf_counter_ns() - computed

    def warm_up(self) -> None:
        """Compute a few tokens, so that the first request finds all ready."""
        warm_up(self, min(self._block_size, self._decoder.num_positions))

    def measure_block_ns(self) -> float:
        """Return what copying a block to the host tier or back takes; overwrites the first blocks of both."""
        return self.copier.measure_ns()

    def reset(self) -> None:
        """Forget all copies. KV may stay: no slot is read before it is written again."""
        self.copier.reset()


def _make_memory(storage: Tensor, num_host_blocks: int) -> BlockMemory:
    """Return the pool and a new host tier. A block is spread over `storage` (layers, 2, blocks, ...)."""
    pool = storage.movedim(2, 0)  # (blocks, layers, 2, ...)
    if storage.is_cuda:
        return DeviceBlocks(pool, num_host_blocks, CudaStream(storage.device))
    # numpy, because torch would copy with as many threads as compute.
    return ArrayBlocks(pool.view(torch.uint8).numpy(), num_host_blocks)


def _sample_rows(logits: Tensor, draws: list[Draw]) -> list[int]:
    """Sample all rows (rows, vocab_size); if that fails, find the row at fault and fail only its request."""
    try:
        return sample(logits, draws)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        logger.exception("Sampling failed; the rows are sampled one by one")
    token_ids = []
    for row, draw in enumerate(draws):
        try:
            token_ids += sample(logits[row : row + 1], [draw])
        except Exception:
            logger.exception("Row %d cannot be sampled with %s", row, draw.params)
            token_ids.append(FAILED_TOKEN_ID)
    return token_ids
