"""Maps sequences to blocks: prefix lookup, allocation, publishing, release.

Of a sequence's tokens, by position:

    [0, num_cached)              KV found in the prefix cache at admission; shared blocks, always full
    [num_cached, num_computed)   KV computed by this sequence; full ones of these are published
    [num_computed, num_tokens)   not computed yet; blocks exist only for what this step computes
"""

from engine.errors import EngineInvariantError
from engine.kv.block_hash import extend_block_hashes, root_hash
from engine.kv.block_pool import BlockPool
from engine.records import BlockOp, FreeCause
from engine.sequence import Sequence


class KVCacheManager:
    """Block tables of all sequences over one pool. The only writer of `Sequence.block_table`."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        """Make the pool."""
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        # Hash of a block that a running sequence is computing -> that sequence's id.
        self._pending: dict[bytes, int] = {}

    def get_computed_blocks(self, sequence: Sequence) -> list[int]:
        """Return the blocks of the longest cached prefix. Changes nothing but the sequence's hashes.

        At least the last token is left to compute: its logits are what the sequence waits for.
        """
        if not self.enable_prefix_caching:
            return []
        extend_block_hashes(sequence, self.block_size)
        hits: list[int] = []
        max_hits = (sequence.num_tokens - 1) // self.block_size
        parent = root_hash(sequence.cache_salt)
        for index, block_hash in enumerate(sequence.block_hashes[:max_hits]):
            block_id = self.pool.find(block_hash, parent, self._block_tokens(sequence, index))
            if block_id is None:
                break
            hits.append(block_id)
            parent = block_hash
        return hits

    def is_prefix_pending(self, sequence: Sequence, num_hits: int) -> bool:
        """Whether the next block after the hits is just being computed by a running sequence."""
        max_hits = (sequence.num_tokens - 1) // self.block_size
        return (
            num_hits < min(max_hits, len(sequence.block_hashes))
            and sequence.block_hashes[num_hits] in self._pending
        )

    def num_blocks_needed(self, sequence: Sequence, num_tokens: int) -> int:
        """How many more blocks the sequence needs to hold its first `num_tokens` tokens."""
        return max(0, -(-num_tokens // self.block_size) - len(sequence.block_table))

    def can_admit(self, hits: list[int], num_tokens: int, num_reserved: int) -> bool:
        """Whether a sequence with these hits can hold `num_tokens`, leaving `num_reserved` blocks.

        Hits that nobody references sit in the free list; taking them leaves fewer to allocate.
        """
        num_new = -(-num_tokens // self.block_size) - len(hits)
        num_idle_hits = sum(self.pool.is_available(block_id) for block_id in hits)
        return num_new + num_idle_hits + num_reserved <= self.pool.num_available

    def admit(self, sequence: Sequence, hits: list[int], num_tokens: int) -> None:
        """Pin the hits and allocate what is missing to hold `num_tokens`; check `can_admit` first."""
        for block_id in hits:
            self.pool.touch(block_id, sequence.slot)
        sequence.block_table = list(hits)
        if not self.try_grow(sequence, num_tokens):
            raise EngineInvariantError("admitted without the blocks for it")
        if self.enable_prefix_caching:
            for block_hash in sequence.block_hashes[len(hits) :]:
                self._pending.setdefault(block_hash, sequence.seq_id)

    def try_grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocate what is missing to hold the first `num_tokens` tokens; all or nothing."""
        num_needed = self.num_blocks_needed(sequence, num_tokens)
        if num_needed > self.pool.num_available:
            return False
        for _ in range(num_needed):
            sequence.block_table.append(self.pool.allocate(sequence.slot))
        return True

    def publish_full_blocks(self, sequence: Sequence, num_computed_before: int) -> None:
        """Make the blocks that the step has just filled findable. Call after the KV is written."""
        first, last = num_computed_before // self.block_size, sequence.num_computed_tokens // self.block_size
        if not self.enable_prefix_caching or first == last:
            return
        extend_block_hashes(sequence, self.block_size)
        for index in range(first, last):
            block_hash = sequence.block_hashes[index]
            parent = sequence.block_hashes[index - 1] if index else root_hash(sequence.cache_salt)
            tokens = self._block_tokens(sequence, index)
            self.pool.store_hash(sequence.block_table[index], sequence.slot, block_hash, parent, tokens)
            if self._pending.get(block_hash) == sequence.seq_id:
                del self._pending[block_hash]

    def free(self, sequence: Sequence, cause: FreeCause) -> int:
        """Give all blocks of the sequence back, tail first; return how many became available."""
        num_released = self.pool.free(sequence.block_table[::-1], sequence.slot, cause)
        for block_hash in sequence.block_hashes:
            if self._pending.get(block_hash) == sequence.seq_id:
                del self._pending[block_hash]
        sequence.block_table = []
        return num_released

    def take_ops(self) -> list[BlockOp]:
        """Drain the pool's operations."""
        return self.pool.take_ops()

    def check_integrity(self, running: list[Sequence], waiting: list[Sequence]) -> None:
        """Raise `EngineInvariantError` unless pool and block tables tell the same story."""
        self.pool.check_integrity()
        refs = [0] * self.pool.num_blocks
        for sequence in running:
            if len(set(sequence.block_table)) != len(sequence.block_table):
                raise EngineInvariantError(f"{sequence!r} holds a block twice")
            if len(sequence.block_table) < -(-sequence.num_computed_tokens // self.block_size):
                raise EngineInvariantError(f"{sequence!r} has fewer blocks than computed tokens")
            for block_id in sequence.block_table:
                refs[block_id] += 1
        for sequence in waiting:
            if sequence.block_table or sequence.num_computed_tokens:
                raise EngineInvariantError(f"{sequence!r} waits but holds blocks")
        for block in self.pool.blocks:
            if block.ref_cnt != refs[block.block_id]:
                raise EngineInvariantError(
                    f"block {block.block_id}: {block.ref_cnt=}, {refs[block.block_id]} owners"
                )
        alive = {sequence.seq_id for sequence in running}
        if not alive.issuperset(self._pending.values()):
            raise EngineInvariantError("a block is pending for a sequence that does not run")

    def _block_tokens(self, sequence: Sequence, index: int) -> tuple[int, ...]:
        start = index * self.block_size
        return tuple(sequence.token_ids[start : start + self.block_size])
