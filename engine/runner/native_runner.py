"""Runs a model through the native kernels: one call a step, without the interpreter. No torch."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import EngineInvariantError
from engine.kernels.cpu.library import NativeModel, StepBatch, StepOutput, Want
from engine.model.uniform import uniform
from engine.runner.base import LocalRunner, ModelRunnerOutput
from engine.runner.copier import ArrayBlocks, BlockCopier
from engine.runner.warm_up import make_text, warm_up
from engine.scheduling.output import ScheduledSequence, SchedulerOutput
from engine.sequence import Sequence


class NativeRunner(LocalRunner):
    """A `ModelRunner` over a native model, which holds weights and KV pool. Owned by one thread."""

    def __init__(
        self, model: NativeModel, *, eos_token_ids: frozenset[int], num_host_blocks: int = 0
    ) -> None:
        """Take a finished model; make the host tier."""
        self.model = model
        self.vocab_size = model.config.vocab_size
        self.eos_token_ids = eos_token_ids
        self._block_size = model.sizes.block_size
        pool = model.view_kv().reshape(model.sizes.num_blocks, -1)  # (blocks, bytes) uint8
        self.copier = BlockCopier(ArrayBlocks(pool, num_host_blocks), self._block_size)

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute all scheduled tokens, write their KV, choose tokens where `needs_sampling`.

        Copies run beside that; raises `RuntimeError` if one fails.
        """
        self.copier.begin(scheduler_output)
        output = StepOutput([], 0, 0)
        if scheduler_output.scheduled:
            output = self.model.step(make_step_batch(scheduler_output.scheduled, self._block_size))
        finished_loads = self.copier.finish(scheduler_output.awaited_loads)
        return ModelRunnerOutput(output.token_ids, output.forward_ns, output.sample_ns, finished_loads)

    def warm_up(self) -> None:
        """Compute a few tokens, so that the first request finds all ready."""
        warm_up(self, min(self._block_size, self.model.sizes.num_positions))

    def measure_block_ns(self) -> float:
        """Return what copying a block to the host tier or back takes; overwrites the first blocks of both."""
        return self.copier.measure_ns()

    def reset(self) -> None:
        """Forget all copies. KV may stay: no slot is read before it is written again."""
        self.copier.reset()

    def logits(self, token_ids: list[int]) -> "NDArray[np.float32]":
        """Return the logits (tokens, vocab_size) after each token of a text, computed in one step.

        For measurements: overwrites the first blocks of the pool, so no engine may use this runner.
        """
        num_blocks = -(-len(token_ids) // self._block_size)
        sequence = make_text(token_ids, list(range(num_blocks)))
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
