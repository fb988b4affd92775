"""Runs a decoder in plain torch, on the CPU or on CUDA: the oracle and the fallback of faster runners."""

import logging
import time

import torch
from torch import Tensor

from engine.model.decoder import Decoder
from engine.model.sampler import Draw, sample
from engine.records import FAILED_TOKEN_ID
from engine.runner.base import ModelRunnerOutput
from engine.runner.batch import BatchLayout, make_batch
from engine.sampling_params import SamplingParams
from engine.scheduling.output import ScheduledSequence, SchedulerOutput
from engine.sequence import EngineRequest, Sequence

_WARM_UP_TOKENS = 16

logger = logging.getLogger(__name__)


class TorchRunner:
    """A `ModelRunner` over a `Decoder` and its KV pool. Owned by one thread."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        num_blocks: int,
        block_size: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        """Allocate the KV pool; raises `RuntimeError` (torch's) when memory does not suffice."""
        self.vocab_size = decoder.config.vocab_size
        self.eos_token_ids = eos_token_ids
        self._decoder = decoder
        self._cache = decoder.make_cache(num_blocks, block_size)
        self.device = decoder.device
        self._layout = BatchLayout(
            block_size=block_size,
            bytes_per_token=decoder.config.kv_size * decoder.dtype.itemsize,
            device=decoder.device,
            dtype=decoder.dtype,
        )

    @torch.inference_mode()
    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute all scheduled tokens, write their KV, sample where `needs_sampling`."""
        scheduled = scheduler_output.scheduled
        if not scheduled:
            return ModelRunnerOutput([], 0, 0)
        started = time.perf_counter_ns()
        logits = self._decoder.forward(make_batch(scheduled, self._layout), self._cache)
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)  # durations would otherwise be those of the launches
        computed = time.perf_counter_ns()
        wanted = [entry for entry in scheduled if entry.needs_sampling]
        sampled = iter(_sample_rows(logits, [_draw_of(entry) for entry in wanted]))
        token_ids = [next(sampled) if entry.needs_sampling else -1 for entry in scheduled]
        return ModelRunnerOutput(token_ids, computed - started, time.perf_counter_ns() - computed)

    def warm_up(self) -> None:
        """Compute a few tokens, prefill and then one more, so that the first request finds all ready."""
        params = SamplingParams(temperature=0.0)
        tokens = min(_WARM_UP_TOKENS, self._layout.block_size)
        request = EngineRequest(request_id="", prompt_token_ids=[0] * tokens, sampling_params=params)
        sequence = Sequence(0, request, max_tokens=1)
        sequence.block_table = [0]
        for start, count in ((0, tokens - 1), (tokens - 1, 1)):
            if count:
                self.execute(SchedulerOutput([ScheduledSequence(sequence, start, count)]))

    def reset(self) -> None:
        """Forget all KV: nothing to do, since no slot is read before it is written again."""


def _sample_rows(logits: Tensor, draws: list[Draw]) -> list[int]:
    """Sample all rows (rows, vocab_size); if that fails, find the row at fault and fail only its request."""
    try:
        return sample(logits, draws)
    except Exception:
        logger.exception("Sampling failed; the rows are sampled one by one")
    token_ids = []
    for row, draw in enumerate(draws):
        try:
            token_ids += sample(logits[row : row + 1], [draw])
        except Exception:
            logger.exception("Row %d cannot be sampled with %s", row, draw.params)
            token_ids.append(FAILED_TOKEN_ID)
    return token_ids


def _draw_of(entry: ScheduledSequence) -> Draw:
    sequence = entry.sequence
    return Draw(sequence.sampling_params, sequence.choice_index, sequence.num_output_tokens)
