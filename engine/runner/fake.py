"""A model for tests of logic: the next token is a hash of all earlier tokens.

It also checks the engine's promises: it keeps its own "KV" (a hash of the token history per slot of
each block) and computes from that alone, so a wrong block table, a shared block that was written
twice or a stale cache hit changes the output instead of passing unseen. Copies from the host tier take
`load_steps` steps, and what they write to is unreadable meanwhile.
"""

import hashlib
import time

from engine.errors import EngineInvariantError
from engine.kv.loads import Load
from engine.runner.base import LocalRunner, ModelRunnerOutput
from engine.scheduling.output import ScheduledSequence, SchedulerOutput


def next_token(history: bytes, vocab_size: int) -> int:
    """Return the token after a history; `history` is the chain value of `extend_history`."""
    return int.from_bytes(hashlib.blake2b(b"next" + history, digest_size=8).digest(), "little") % vocab_size


def extend_history(history: bytes, token_id: int) -> bytes:
    """Return the chain value after one more token."""
    return hashlib.blake2b(history + token_id.to_bytes(8, "little"), digest_size=16).digest()


class FakeRunner(LocalRunner):
    """Deterministic stand-in for a model, without tensors."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        vocab_size: int = 1000,
        eos_token_ids: frozenset[int] = frozenset(),
        load_steps: int = 1,
    ) -> None:
        """Make an empty KV of `num_blocks` blocks."""
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.load_steps = load_steps
        self._kv: dict[tuple[int, int], bytes] = {}
        self._host: dict[int, list[bytes]] = {}
        self._loads: list[tuple[int, Load, list[list[bytes]]]] = []  # steps left, load, what it brings

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the histories of all scheduled tokens from the blocks."""
        started = time.perf_counter_ns()
        for block_id, host_id in scheduler_output.swap_outs:
            self._host[host_id] = [self._read_slot(block_id, i) for i in range(self.block_size)]
        for load in scheduler_output.loads:
            self._begin(load)
        token_ids = [self._execute_one(entry) for entry in scheduler_output.scheduled]
        finished = self._move_loads(scheduler_output.awaited_loads)
        return ModelRunnerOutput(token_ids, time.perf_counter_ns() - started, 0, finished)

    def _begin(self, load: Load) -> None:
        contents = []
        for host_id, block_id in load.pairs:
            contents.append(self._host[host_id])
            for offset in range(self.block_size):
                self._kv.pop((block_id, offset), None)
        self._loads.append((self.load_steps, load, contents))

    def _move_loads(self, awaited: list[int]) -> list[int]:
        """Bring what is due, in order; return the ids."""
        self._loads = [(steps - 1, load, contents) for steps, load, contents in self._loads]
        finished: list[int] = []
        while self._loads and (self._loads[0][0] <= 0 or set(awaited) - set(finished)):
            _, load, contents = self._loads.pop(0)
            for (_, block_id), histories in zip(load.pairs, contents, strict=True):
                self._kv.update({(block_id, offset): value for offset, value in enumerate(histories)})
            finished.append(load.load_id)
        return finished

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
        return self._read_slot(block_table[position // self.block_size], position % self.block_size)

    def _read_slot(self, block_id: int, offset: int) -> bytes:
        key = (block_id, offset)
        if key not in self._kv:
            raise EngineInvariantError(f"slot {key} is read before it is written")
        return self._kv[key]

    def reset(self) -> None:
        """Forget all KV."""
        self._kv.clear()
        self._host.clear()
        self._loads.clear()
