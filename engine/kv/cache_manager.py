"""Maps sequences to blocks: prefix lookup, allocation, publishing, release.

Of a sequence's tokens, by position:

    [0, hits * block_size)         KV found in the prefix cache at this admission; shared, always full
    [.., num_computed_tokens)      KV computed by this sequence; full blocks of these are published
    [num_computed_tokens, ..)      not computed yet; blocks exist only for what this step computes
"""

from engine.errors import EngineInvariantError
from engine.kv.block_hash import extend_block_hashes, root_hash
from engine.kv.block_pool import BlockPool
from engine.records import FreeCause
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
        """Return the blocks of the longest cached prefix. Changes nothing but what the sequence remembers.

        At least the last token is left to compute: its logits are what the sequence waits for. The
        lookup goes on from the last one's result unless a block was evicted meanwhile.
        """
        if not self.enable_prefix_caching:
            return []
        extend_block_hashes(sequence, self.block_size)
        if sequence.prefix_hits_epoch != self.pool.num_evictions:
            sequence.prefix_hits = []
            sequence.prefix_hits_epoch = self.pool.num_evictions
        hits, hashes = sequence.prefix_hits, sequence.block_hashes
        for index in range(len(hits), (sequence.num_tokens - 1) // self.block_size):
            block_id = self.pool.find(
                hashes[index], self._parent(sequence, index), sequence.block_tokens[index]
            )
            if block_id is None:
                break
            hits.append(block_id)
        return hits

    def is_prefix_pending(self, sequence: Sequence, num_hits: int) -> bool:
        """Whether the next block after the hits is just being computed by a running sequence.

        Remembers the block, so that `still_awaits_prefix` need not look up anything.
        """
        max_hits = (sequence.num_tokens - 1) // self.block_size
        if num_hits < min(max_hits, len(sequence.block_hashes)):
            sequence.awaited_hash = sequence.block_hashes[num_hits]
        return self.still_awaits_prefix(sequence)

    def still_awaits_prefix(self, sequence: Sequence) -> bool:
        """Whether the block that the sequence waited for is still being computed."""
        if sequence.awaited_hash in self._pending:
            return True
        sequence.awaited_hash = None
        return False

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
            self.pool.store_hash(
                sequence.block_table[index],
                sequence.slot,
                block_hash,
                self._parent(sequence, index),
                sequence.block_tokens[index],
            )
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

    def check_integrity(self, running: list[Sequence], waiting: list[Sequence]) -> None:
        """Raise `EngineInvariantError` unless pool and block tables tell the same story."""
        self.pool.check_integrity()
        refs = [0] * self.pool.num_blocks
        for sequence in running:
            self._check_table(sequence)
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

    def _check_table(self, sequence: Sequence) -> None:
        table = sequence.block_table
        if len(set(table)) != len(table):
            raise EngineInvariantError(f"{sequence!r} holds a block twice")
        num_needed = -(-sequence.num_computed_tokens // self.block_size)
        if not num_needed <= len(table) <= -(-sequence.num_tokens // self.block_size):
            raise EngineInvariantError(f"{sequence!r} has too few or too many blocks")
        for index, block_id in enumerate(table):
            block = self.pool.blocks[block_id]
            if block.block_hash is None:
                continue
            if (index + 1) * self.block_size > sequence.num_computed_tokens:
                raise EngineInvariantError(
                    f"{sequence!r}: block {block_id} can be found before it is written"
                )
            if (block.parent_hash, block.tokens) != (
                self._parent(sequence, index),
                sequence.block_tokens[index],
            ):
                raise EngineInvariantError(
                    f"{sequence!r}: block {block_id} holds other tokens than it should"
                )

    def _parent(self, sequence: Sequence, index: int) -> bytes:
        return sequence.block_hashes[index - 1] if index else root_hash(sequence.cache_salt)
