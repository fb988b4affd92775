"""Runs a decoder on a GPU without letting it wait for the interpreter.

A step's result is known to the host one step late, so the runner computes ahead: as soon as a step is queued,
so is the next token of every sequence that will go on if all is as usual, from tokens that are only on the
device yet. While the device computes those, the host learns the tokens of the step before, and the scheduler
decides, about exact books, what the next step is. What it decides and is computed already is taken as it is;
the rest (new prompts, mostly) is computed beside it; what it does not want, of sequences that ended or were
preempted, is dropped.

Dropping is safe because the device works in the order in which it was told: a dropped row has written to one
slot that nobody reads, and whoever owns its block next writes it later. Only copies go beside that order, so
nothing is computed ahead while one may still read, and loads begin when nothing is. Neither the scheduler nor
the records know of any of this.
"""

import logging
import time

import torch

from engine.model.attention import KVCache
from engine.model.decoder import Decoder
from engine.records import FAILED_TOKEN_ID
from engine.runner.base import LocalRunner, ModelRunnerOutput
from engine.runner.copier import BlockCopier, BlockMemory
from engine.runner.device import Device
from engine.runner.launcher import Launcher, LaunchSizes, PendingTokens
from engine.runner.run_ahead import RunAhead, shares_ahead
from engine.runner.shares import Share, share_of
from engine.runner.smaller_steps import compute_smaller, is_out_of_memory
from engine.runner.warm_up import warm_up
from engine.scheduling.output import ScheduledSequence, SchedulerOutput

logger = logging.getLogger(__name__)


class CudaRunner(LocalRunner):
    """A `ModelRunner` over a `Decoder`, its KV pool and a device. Owned by one thread."""

    def __init__(  # noqa: PLR0913 - what it owns comes from outside
        self,
        decoder: Decoder,
        cache: KVCache,
        device: Device,
        sizes: LaunchSizes,
        memory: BlockMemory,
        *,
        eos_token_ids: frozenset[int],
        computes_ahead: bool = True,
        captures_graphs: bool = True,
    ) -> None:
        """Allocate buffers; raises `torch.OutOfMemoryError` when memory does not suffice."""
        self.vocab_size = decoder.config.vocab_size
        self.eos_token_ids = eos_token_ids
        self.copier = BlockCopier(memory, sizes.block_size)
        self.num_taken = 0
        """Tokens that had been computed ahead when they were asked for."""
        self.num_dropped = 0
        """Tokens that were computed ahead for nobody."""
        self._device = device
        self._sizes = sizes
        self._launcher = Launcher(decoder, cache, device, sizes, captures_graphs=captures_graphs)
        self._computes_ahead = computes_ahead
        self._ahead: RunAhead | None = None
        self._undecided: set[int] = set()

    @torch.inference_mode()
    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute all scheduled tokens, write their KV, sample where `needs_sampling`.

        `forward_ns` is how long the host waited for all of that. Copies run beside it; raises `RuntimeError`
        if one fails.
        """
        if scheduler_output.loads and self._ahead is not None:
            self._ahead.pending.wait()  # it may have written to blocks that are now loaded into
        self.copier.begin(scheduler_output)
        started = time.perf_counter_ns()
        token_ids = self._compute(scheduler_output.scheduled)
        forward_ns = time.perf_counter_ns() - started if scheduler_output.scheduled else 0
        finished_loads = self.copier.finish(scheduler_output.awaited_loads)
        return ModelRunnerOutput(token_ids, forward_ns, 0, finished_loads)

    def _compute(self, scheduled: list[ScheduledSequence]) -> list[int]:
        """Return a token for each scheduled sequence; queue what probably comes next before waiting."""
        done, self._ahead = self._ahead, None
        taken = {entry.sequence.seq_id for entry in scheduled if done is not None and done.has(entry)}
        rest = [entry for entry in scheduled if entry.sequence.seq_id not in taken]
        launched = self._try_launch([share_of(entry) for entry in rest]) if rest else None
        sampled: dict[int, int] = {}
        undecided: set[int] = set()
        if rest and launched is None:
            if done is not None:
                done.pending.wait()  # before many launches use the buffers for results again
            sampled.update(self._retry(rest, undecided))
        self._ahead = self._compute_ahead(scheduled)
        if done is not None:
            sampled.update(done.pending.settle(taken))
            undecided |= done.pending.undecided
            self.num_taken += len(taken)
            self.num_dropped += len(done.pending.wanted) - len(taken)
        if launched is not None:
            sampled.update(launched.settle({entry.sequence.seq_id for entry in rest}))
            undecided |= launched.undecided
        self._undecided = undecided
        if self._ahead is not None:
            for seq_id in undecided:
                self._ahead.drop(seq_id)
        return [self._token_of(entry, sampled) for entry in scheduled]

    def _token_of(self, entry: ScheduledSequence, sampled: dict[int, int]) -> int:
        token_id = sampled.get(entry.sequence.seq_id, -1)
        return token_id if entry.needs_sampling or token_id == FAILED_TOKEN_ID else -1

    def _compute_ahead(self, scheduled: list[ScheduledSequence]) -> RunAhead | None:
        """Queue the next token of every sequence that goes on, unless a copy may still read a block."""
        if not self._computes_ahead or self.copier.is_reading:
            return None
        shares = shares_ahead(scheduled, self._sizes.block_size)
        # Whose last token the device could not decide, will hardly have its next one decided there.
        shares = [share for share in shares if share.sequence.seq_id not in self._undecided]
        launched = self._try_launch(shares) if shares else None
        return None if launched is None else RunAhead(launched, self._sizes.block_size)

    def _try_launch(self, shares: list[Share]) -> PendingTokens | None:
        """Queue shares; None if memory does not suffice. The error, which holds on to memory, ends here."""
        try:
            return self._launcher.launch(shares)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None

    def _retry(self, entries: list[ScheduledSequence], undecided: set[int]) -> dict[int, int]:
        """Compute in smaller parts what was too much at once; return tokens by sequence.

        Adds the sequences to `undecided` whose tokens the device did not decide.
        """
        logger.warning(
            "A step of %d sequences needs more memory than the GPU has left; in parts", len(entries)
        )
        self._device.free_unused()

        def compute(part: list[ScheduledSequence]) -> list[int]:
            launched = self._launcher.launch([share_of(entry) for entry in part])
            sampled = launched.settle({entry.sequence.seq_id for entry in part})
            undecided.update(launched.undecided)
            return [sampled.get(entry.sequence.seq_id, -1) for entry in part]

        token_ids = compute_smaller(entries, compute)
        return dict(zip((entry.sequence.seq_id for entry in entries), token_ids, strict=True))

    def warm_up(self) -> None:
        """Compute a few tokens, so that the first request finds all ready."""
        warm_up(self, min(self._sizes.block_size, self._sizes.max_model_len))

    def measure_block_ns(self) -> float:
        """Return what copying a block to the host tier or back takes; overwrites the first blocks of both."""
        return self.copier.measure_ns()

    def reset(self) -> None:
        """Forget all copies, and what was computed ahead, once the device has nothing left to do."""
        self._ahead = None
        self._launcher.forget()
        self._device.record().wait()
        self.copier.reset()
