"""A model for tests of logic: the next token is a hash of all earlier tokens.

It also checks the engine's promises: it keeps its own "KV" (a hash of the token history per slot of
each block) and computes from that alone, so a wrong block table, a shared block that was written
twice or a stale cache hit changes the output instead of passing unseen.
"""

import hashlib
import time

from engine.errors import EngineInvariantError
from engine.runner.base import ModelRunnerOutput
from engine.scheduling.output import ScheduledSequence, SchedulerOutput


def next_token(history: bytes, vocab_size: int) -> int:
    """Return the token after a history; `history` is the chain value of `extend_history`."""
    return int.from_bytes(hashlib.blake2b(b"next" + history, digest_size=8).digest(), "little") % vocab_size


def extend_history(history: bytes, token_id: int) -> bytes:
    """Return the chain value after one more token."""
    return hashlib.blake2b(history + token_id.to_bytes(8, "little"), digest_size=16).digest()


class FakeRunner:
    """Deterministic stand-in for a model, without tensors."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        vocab_size: int = 1000,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Make an empty KV of `num_blocks` blocks."""
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._kv: dict[tuple[int, int], bytes] = {}

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the histories of all scheduled tokens from the blocks."""
        started = time.perf_counter_ns()
        token_ids = [self._execute_one(entry) for entry in scheduler_output.scheduled]
        return ModelRunnerOutput(token_ids, time.perf_counter_ns() - started, 0)

    def _execute_one(self, entry: ScheduledSequence) -> int:
        sequence, start = entry.sequence, entry.num_computed_tokens
        history = self._read(sequence.block_table, start - 1) if start else b""
        for position in range(start, start + entry.num_scheduled_tokens):
            history = extend_history(history, sequence.token_ids[position])
            block_id = sequence.block_table[position // self.block_size]
            if not 0 <= block_id < self.num_blocks:
                raise EngineInvariantError(f"block {block_id} is outside the pool")
            self._kv[block_id, position % self.block_size] = history
        return next_token(history, self.vocab_size) if entry.needs_sampling else -1

    def _read(self, block_table: list[int], position: int) -> bytes:
        key = (block_table[position // self.block_size], position % self.block_size)
        if key not in self._kv:
            raise EngineInvariantError(f"slot {key} is read before it is written")
        return self._kv[key]

    def reset(self) -> None:
        """Forget all KV."""
        self._kv.clear()
