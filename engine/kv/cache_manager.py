"""Maps sequences to blocks: prefix lookup, allocation, publishing, release, and the host tier.

Of a sequence's tokens, by position:

    [0, hits * block_size)         KV found in the prefix cache at this admission; shared, always full
    [.., loaded)                   KV found in the host tier, copied into blocks of the sequence's own
    [.., num_computed_tokens)      KV computed by this sequence; full blocks of these are published
    [num_computed_tokens, ..)      not computed yet; blocks exist for what this step computes, for what
                                   makes the sequence safe after a preemption, and for one look ahead
"""

from collections.abc import Iterable

from engine.errors import EngineInvariantError
from engine.kv.block_hash import extend_block_hashes, private_root_hash, root_hash
from engine.kv.block_pool import BlockPool, KVCacheBlock
from engine.kv.host_tier import HostTier
from engine.kv.loads import Load
from engine.kv.prefix_history import PrefixHistory
from engine.records import BlockOp, BlockOpKind, FreeCause, PrefixMiss
from engine.sequence import Sequence


class KVCacheManager:
    """Block tables of all sequences over one pool. The only writer of `Sequence.block_table`.

    `swap_outs` and `new_loads` are the copies that the next step has to begin; `loads` are those under way.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        num_host_blocks: int = 0,
        offload: bool = True,
    ) -> None:
        """Make the pool and the host tier."""
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self.pool.on_evict = self._note_eviction
        self.host = HostTier(num_host_blocks)
        self.swap_outs: list[tuple[int, int]] = []
        self.new_loads: list[Load] = []
        self.loads: dict[int, Load] = {}
        self.step = 0
        """Number of the step that is being planned."""
        self._offload = offload and num_host_blocks > 0
        self._history = PrefixHistory(num_blocks)
        self._beneficiary = ""
        self._num_loads = 0
        # Hash of a block that a running sequence is computing -> that sequence's id.
        self._pending: dict[bytes, int] = {}

    # ------------------------------------------------------------------ lookup

    def get_computed_blocks(self, sequence: Sequence) -> list[int]:
        """Return the blocks of the longest cached prefix. Changes nothing but what the sequence remembers.

        At least the last token is left to compute: its logits are what the sequence waits for. The
        lookup goes on from the last one's result, of which whatever was evicted meanwhile is dropped first.
        """
        if not self.enable_prefix_caching:
            return []
        self._extend_hashes(sequence)
        if sequence.prefix_hits_epoch != self.pool.num_evictions:
            self._drop_evicted(sequence)
        hits = sequence.prefix_hits
        for index in range(len(hits), self._max_hits(sequence)):
            block_id = self.pool.find(*self._identity(sequence, index))
            if block_id is None:
                break
            hits.append(block_id)
        return hits

    def _drop_evicted(self, sequence: Sequence) -> None:
        """Cut the remembered hits where the first block does not hold any more what it did.

        A long sequence that does not fit is looked at in every step, so this has to be quick: 60 ns a block.
        """
        blocks, hashes, contents = self.pool.blocks, sequence.block_hashes, sequence.block_tokens
        for index, block_id in enumerate(sequence.prefix_hits):
            block = blocks[block_id]
            if block.block_hash != hashes[index] or block.tokens != contents[index]:
                del sequence.prefix_hits[index:]
                break
        sequence.prefix_hits_epoch = self.pool.num_evictions

    def get_host_blocks(self, sequence: Sequence, num_hits: int) -> list[int]:
        """Return the host blocks that go on where the cached prefix ends. Changes nothing."""
        found: list[int] = []
        if self.host.num_used == 0:
            return found
        self._extend_hashes(sequence)
        for index in range(num_hits, self._max_hits(sequence)):
            host_id = self.host.find(*self._identity(sequence, index))
            if host_id is None:
                break
            found.append(host_id)
        return found

    def explain_miss(self, sequence: Sequence, num_found: int) -> PrefixMiss | None:
        """Say why the prefix cache held no more than `num_found` blocks; None if it held all it can."""
        if not self.enable_prefix_caching or num_found >= self._max_hits(sequence):
            return None
        return self._history.explain(*self._identity(sequence, num_found), num_found * self.block_size)

    def is_prefix_pending(self, sequence: Sequence, num_hits: int) -> bool:
        """Whether the next block after the hits is just being computed by a running sequence.

        Remembers the block, so that `still_awaits_prefix` need not look up anything.
        """
        if num_hits < min(self._max_hits(sequence), len(sequence.block_hashes)):
            sequence.awaited_hash = sequence.block_hashes[num_hits]
        return self.still_awaits_prefix(sequence)

    def still_awaits_prefix(self, sequence: Sequence) -> bool:
        """Whether the block that the sequence waited for is still being computed."""
        if sequence.awaited_hash in self._pending:
            return True
        sequence.awaited_hash = None
        return False

    # ------------------------------------------------------------------ allocation

    def num_blocks_needed(self, sequence: Sequence, num_tokens: int) -> int:
        """How many more blocks the sequence needs to hold its first `num_tokens` tokens."""
        return max(0, -(-num_tokens // self.block_size) - len(sequence.block_table))

    def num_missing(self, hits: list[int], num_tokens: int, num_reserved: int) -> int:
        """How many blocks are missing to hold `num_tokens` with these hits, leaving `num_reserved`; 0: none.

        Hits that nobody references sit in the free list; taking them leaves fewer to allocate.
        """
        num_new = -(-num_tokens // self.block_size) - len(hits)
        num_idle_hits = sum(self.pool.is_available(block_id) for block_id in hits)
        return max(0, num_new + num_idle_hits + num_reserved - self.pool.num_available)

    def admit(self, sequence: Sequence, hits: list[int], host_ids: list[int], num_tokens: int) -> None:
        """Pin the hits and allocate what is missing to hold `num_tokens`; check `num_missing` first.

        A load brings `host_ids` into the blocks after the hits.
        """
        for host_id in host_ids:  # first: what is allocated now may push other blocks into the host tier
            self.host.pin(host_id)
        for block_id in hits:
            self.pool.touch(block_id, sequence.slot)
        sequence.block_table = list(hits)
        if not self.try_grow(sequence, num_tokens):
            raise EngineInvariantError("admitted without the blocks for it")
        self.release_pins(sequence)
        if self.enable_prefix_caching:
            for block_hash in sequence.block_hashes[len(hits) :]:
                self._pending.setdefault(block_hash, sequence.seq_id)
        if host_ids:
            self._begin_load(sequence, host_ids, sequence.block_table[len(hits) : len(hits) + len(host_ids)])

    def _begin_load(self, sequence: Sequence, host_ids: list[int], targets: list[int]) -> None:
        """Have pinned host blocks copied into as many blocks of the sequence."""
        self._num_loads += 1
        pairs = list(zip(host_ids, targets, strict=True))
        load = Load(self._num_loads, sequence.seq_id, sequence.slot, pairs, self.step)
        self.loads[load.load_id] = load
        self.new_loads.append(load)
        sequence.load_id = load.load_id
        for host_id, block_id in pairs:
            self.pool.ops.append(BlockOp(BlockOpKind.SWAP_IN, block_id, sequence.slot, host_id))

    def try_grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocate what is missing to hold the first `num_tokens` tokens; all or nothing."""
        num_needed = self.num_blocks_needed(sequence, num_tokens)
        if num_needed > self.pool.num_available:
            return False
        self._beneficiary = sequence.request_id
        for _ in range(num_needed):
            sequence.block_table.append(self.pool.allocate(sequence.slot))
        return True

    def look_ahead(self, sequence: Sequence) -> None:
        """Reserve the sequence's next block; there must be a blank one."""
        self._beneficiary = sequence.request_id
        sequence.block_table.append(self.pool.allocate(sequence.slot, BlockOpKind.LOOKAHEAD))
        sequence.has_lookahead = True

    def take_back_lookahead(self, sequence: Sequence) -> None:
        """Make the block that was reserved ahead of need available again."""
        self.pool.free([sequence.block_table.pop()], sequence.slot, FreeCause.UNUSED_LOOKAHEAD)
        sequence.has_lookahead = False

    # ------------------------------------------------------------------ publishing and release

    def publish_full_blocks(self, sequence: Sequence, num_computed_before: int) -> None:
        """Make the blocks that the step has just filled findable. Call after the KV is written."""
        first, last = num_computed_before // self.block_size, sequence.num_computed_tokens // self.block_size
        if not self.enable_prefix_caching or first == last:
            return
        self._extend_hashes(sequence)
        for index in range(first, last):
            block_hash, parent_hash, tokens = self._identity(sequence, index)
            block_id = sequence.block_table[index]
            if self.pool.store_hash(block_id, sequence.slot, block_hash, parent_hash, tokens):
                self._history.note_published(parent_hash, tokens, block_hash, sequence.request_id)
            if self._pending.get(block_hash) == sequence.seq_id:
                del self._pending[block_hash]

    def swap_out(self, sequence: Sequence) -> int:
        """Copy the sequence's full blocks to the host tier and keep them there; return how many fit."""
        self._extend_hashes(sequence)
        for index in range(sequence.num_computed_tokens // self.block_size):
            identity = self._identity(sequence, index)
            host_id = self.host.find(*identity)
            if host_id is None:
                host_id = self._copy_out(sequence.block_table[index], sequence.slot, identity)
            if host_id is None:
                break
            self.host.pin(host_id)
            sequence.host_pins.append(host_id)
        return len(sequence.host_pins)

    def free(self, sequence: Sequence, cause: FreeCause) -> int:
        """Give all blocks of the sequence back, tail first; return how many became available.

        Those that a load writes to stay taken until it ends: the load is then an orphan.
        """
        num_before = self.pool.num_available
        if sequence.has_lookahead:
            self.take_back_lookahead(sequence)
        table = sequence.block_table
        load = self.loads.get(sequence.load_id)
        if load is not None:
            load.is_orphan = True
            written = {block_id for _, block_id in load.pairs}
            table = [block_id for block_id in table if block_id not in written]
        self.pool.free(table[::-1], sequence.slot, cause)
        for block_hash in sequence.block_hashes:
            if self._pending.get(block_hash) == sequence.seq_id:
                del self._pending[block_hash]
        sequence.block_table = []
        sequence.load_id = 0
        return self.pool.num_available - num_before

    def release_pins(self, sequence: Sequence) -> None:
        """Let the host blocks go that were kept for a preempted sequence."""
        for host_id in sequence.host_pins:
            self.host.unpin(host_id)
        sequence.host_pins = []

    # ------------------------------------------------------------------ host tier

    def finish_load(self, load: Load) -> None:
        """Book that a load has ended; an orphan's blocks become available."""
        del self.loads[load.load_id]
        for host_id, _ in load.pairs:
            self.host.unpin(host_id)
        if load.is_orphan:
            self.pool.free([block_id for _, block_id in load.pairs][::-1], load.slot, FreeCause.ABORTED)

    def _note_eviction(self, block: KVCacheBlock, slot: int) -> None:
        block_hash = block.block_hash
        if block_hash is None:
            return
        self._history.note_evicted(block_hash, self.step, self._beneficiary)
        if self._offload:
            self._copy_out(block.block_id, slot, (block_hash, block.parent_hash, block.tokens))

    def _copy_out(self, block_id: int, slot: int, identity: tuple[bytes, bytes, bytes]) -> int | None:
        host_id = self.host.store(*identity)
        if host_id is not None:
            self.swap_outs.append((block_id, host_id))
            self.pool.ops.append(BlockOp(BlockOpKind.SWAP_OUT, block_id, slot, host_id))
        return host_id

    # ------------------------------------------------------------------ identities

    def _max_hits(self, sequence: Sequence) -> int:
        return (sequence.num_tokens - 1) // self.block_size

    def _root(self, sequence: Sequence) -> bytes:
        if self.enable_prefix_caching:
            return root_hash(sequence.cache_salt)
        return private_root_hash(sequence.seq_id)

    def _extend_hashes(self, sequence: Sequence) -> None:
        if len(sequence.block_hashes) < len(sequence.token_ids) // self.block_size:
            extend_block_hashes(sequence, self.block_size, self._root(sequence))

    def _identity(self, sequence: Sequence, index: int) -> tuple[bytes, bytes, bytes]:
        """Return hash, parent's hash and tokens of one of the sequence's full blocks."""
        parent = sequence.block_hashes[index - 1] if index else self._root(sequence)
        return sequence.block_hashes[index], parent, sequence.block_tokens[index]

    # ------------------------------------------------------------------ checks

    def check_integrity(self, running: list[Sequence], waiting: list[Sequence]) -> None:
        """Raise `EngineInvariantError` unless pool, block tables and host tier tell the same story."""
        self.pool.check_integrity()
        orphans = [load for load in self.loads.values() if load.is_orphan]
        self._check_owners([*(s.block_table for s in running), *([b for _, b in o.pairs] for o in orphans)])
        for sequence in running:
            self._check_table(sequence)
        for sequence in waiting:
            if sequence.block_table or sequence.num_computed_tokens:
                raise EngineInvariantError(f"{sequence!r} waits but holds blocks")
        alive = {sequence.seq_id for sequence in running}
        if not alive.issuperset(self._pending.values()):
            raise EngineInvariantError("a block is pending for a sequence that does not run")
        loading = {sequence.load_id: sequence.seq_id for sequence in running if sequence.load_id}
        owned = {load.load_id: load.owner for load in self.loads.values() if not load.is_orphan}
        if loading != owned:
            raise EngineInvariantError(f"sequences wait for {loading}, but loads are {owned}")
        num_pins = sum(len(load.pairs) for load in self.loads.values())
        self.host.check_integrity(num_pins + sum(len(sequence.host_pins) for sequence in waiting))

    def _check_owners(self, tables: Iterable[list[int]]) -> None:
        refs = [0] * self.pool.num_blocks
        for table in tables:
            for block_id in table:
                refs[block_id] += 1
        for block in self.pool.blocks:
            if block.ref_cnt != refs[block.block_id]:
                raise EngineInvariantError(
                    f"block {block.block_id}: {block.ref_cnt=}, {refs[block.block_id]} owners"
                )

    def _check_table(self, sequence: Sequence) -> None:
        table = sequence.block_table
        if len(set(table)) != len(table):
            raise EngineInvariantError(f"{sequence!r} holds a block twice")
        num_needed = -(-sequence.num_computed_tokens // self.block_size)
        most = max(sequence.num_tokens, sequence.safe_tokens)
        if not num_needed <= len(table) <= -(-most // self.block_size) + sequence.has_lookahead:
            raise EngineInvariantError(f"{sequence!r} has too few or too many blocks")
        if sequence.num_tokens < sequence.safe_tokens > len(table) * self.block_size:
            raise EngineInvariantError(f"{sequence!r} is safe without the blocks for it")
        for index, block_id in enumerate(table):
            block = self.pool.blocks[block_id]
            if block.block_hash is None:
                continue
            if (index + 1) * self.block_size > sequence.num_computed_tokens:
                raise EngineInvariantError(
                    f"{sequence!r}: block {block_id} can be found before it is written"
                )
            if (block.block_hash, block.parent_hash, block.tokens) != self._identity(sequence, index):
                raise EngineInvariantError(
                    f"{sequence!r}: block {block_id} holds other tokens than it should"
                )
