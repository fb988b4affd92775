"""Runs a model through the native kernels: one call a step, without the interpreter. No torch."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import EngineInvariantError
from engine.kernels.cpu.library import NativeModel, StepBatch, Want
from engine.model.uniform import uniform
from engine.runner.base import ModelRunnerOutput
from engine.sampling_params import SamplingParams
from engine.scheduling.output import ScheduledSequence, SchedulerOutput
from engine.sequence import EngineRequest, Sequence

_WARM_UP_TOKENS = 16


class NativeRunner:
    """A `ModelRunner` over a native model, which holds weights and KV pool. Owned by one thread."""

    def __init__(self, model: NativeModel, *, eos_token_ids: frozenset[int]) -> None:
        """Take a finished model."""
        self.model = model
        self.vocab_size = model.config.vocab_size
        self.eos_token_ids = eos_token_ids
        self._block_size = model.sizes.block_size

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute all scheduled tokens, write their KV, choose tokens where `needs_sampling`."""
        if not scheduler_output.scheduled:
            return ModelRunnerOutput([], 0, 0)
        output = self.model.step(make_step_batch(scheduler_output.scheduled, self._block_size))
        return ModelRunnerOutput(output.token_ids, output.forward_ns, output.sample_ns)

    def warm_up(self) -> None:
        """Compute a few tokens, prefill and then one more, so that the first request finds all ready."""
        num_tokens = min(_WARM_UP_TOKENS, self._block_size)
        sequence = _make_sequence([0] * num_tokens, [0])
        for start, count in ((0, num_tokens - 1), (num_tokens - 1, 1)):
            if count:
                self.execute(SchedulerOutput([ScheduledSequence(sequence, start, count)]))

    def reset(self) -> None:
        """Forget all KV: nothing to do, since no slot is read before it is written again."""

    def logits(self, token_ids: list[int]) -> "NDArray[np.float32]":
        """Return the logits (tokens, vocab_size) after each token of a text, computed in one step.

        For measurements: overwrites the first blocks of the pool, so no engine may use this runner.
        """
        num_blocks = -(-len(token_ids) // self._block_size)
        sequence = _make_sequence(token_ids, list(range(num_blocks)))
        batch = make_step_batch([ScheduledSequence(sequence, 0, len(token_ids))], self._block_size)
        logits: NDArray[Any] = np.empty((len(token_ids), self.vocab_size), np.float32)  # (tokens, vocab_size)
        self.model.step(batch, logits, all_logits=True)
        return logits


def make_step_batch(scheduled: list[ScheduledSequence], block_size: int) -> StepBatch:
    """Return the decision of a step as arrays. Takes about 1 µs a sequence and 10 ns a block."""
    batch = StepBatch()
    for entry in scheduled:
        sequence, start = entry.sequence, entry.num_computed_tokens
        end = start + entry.num_scheduled_tokens
        token_ids, table = sequence.token_ids, sequence.block_table
        if len(table) * block_size < end:
            raise EngineInvariantError(f"{sequence} has no block for a token of this step")
        if entry.num_scheduled_tokens == 1:
            batch.token_ids.append(token_ids[start])
        else:
            batch.token_ids.fromlist(token_ids[start:end])
        batch.num_computed.append(start)
        batch.num_scheduled.append(entry.num_scheduled_tokens)
        batch.tables.fromlist(table)
        batch.table_starts.append(len(batch.tables))
        _add_choice(batch, sequence, is_wanted=end == len(token_ids))
    return batch


def _add_choice(batch: StepBatch, sequence: Sequence, *, is_wanted: bool) -> None:
    """Say how the next token of a sequence is chosen."""
    params = sequence.sampling_params
    if not is_wanted or params.is_greedy:
        batch.wants.append(Want.GREEDY if is_wanted else Want.NOTHING)
        batch.temperatures.append(1.0)
        batch.top_ks.append(0)
        batch.top_ps.append(1.0)
        batch.uniforms.append(0.0)
        return
    batch.wants.append(Want.DRAW)
    batch.temperatures.append(params.temperature)
    batch.top_ks.append(params.top_k)
    batch.top_ps.append(params.top_p)
    batch.uniforms.append(uniform(params.seed or 0, sequence.choice_index, sequence.num_output_tokens))


def _make_sequence(token_ids: list[int], block_table: list[int]) -> Sequence:
    request = EngineRequest(
        request_id="", prompt_token_ids=token_ids, sampling_params=SamplingParams(temperature=0.0)
    )
    sequence = Sequence(0, request, max_tokens=1)
    sequence.block_table = block_table
    return sequence
