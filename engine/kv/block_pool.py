"""Physical KV blocks: who is free, who is referenced, who can be found by hash.

A block is in exactly one of three conditions:

    free    ref_cnt 0, no hash     in the free list
    cached  ref_cnt 0, hash        in the free list too; evicted (hash dropped) when its turn comes
    used    ref_cnt >= 1           not in the free list

so free + cached + used = num_blocks, always (`check_integrity`).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice

from engine.errors import EngineInvariantError
from engine.records import BlockOp, BlockOpKind, FreeCause

HASH_PREFIX_BYTES = 8


class KVCacheBlock:
    """One block. `block_hash`, `parent_hash` and `tokens` are set while it can be found by hash."""

    __slots__ = ("block_hash", "block_id", "last_slot", "parent_hash", "ref_cnt", "tokens")

    def __init__(self, block_id: int) -> None:
        """Start blank and free."""
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        self.parent_hash: bytes = b""
        self.tokens = b""
        self.last_slot = -1


class BlockPool:
    """The pool. Every change is appended to `ops`, which the engine drains into the step record."""

    def __init__(self, num_blocks: int) -> None:
        """Make `num_blocks` blank blocks."""
        self.num_blocks = num_blocks
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.ops: list[BlockOp] = []
        # Least recently freed first; an ordered dict because a hit removes from the middle in O(1).
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._by_hash: dict[bytes, int] = {}
        self._num_cached = 0
        self.num_evictions = 0
        self.on_evict: Callable[[KVCacheBlock, int], None] = lambda *_: None
        """Called with a block that is about to lose its content, and the slot that needs it."""

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated: blank ones and cached ones."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks that still have a hash."""
        return self._num_cached

    @property
    def num_free(self) -> int:
        """Blank blocks."""
        return len(self._free) - self._num_cached

    @property
    def num_used(self) -> int:
        """Referenced blocks."""
        return self.num_blocks - len(self._free)

    def is_available(self, block_id: int) -> bool:
        """Whether the block is unreferenced."""
        return block_id in self._free

    def find(self, block_hash: bytes, parent_hash: bytes, tokens: bytes) -> int | None:
        """Return the block that holds these tokens after this parent, or None.

        Tokens and parent are compared, not only the hash: a collision must never serve foreign KV.
        """
        block_id = self._by_hash.get(block_hash)
        if block_id is None:
            return None
        block = self.blocks[block_id]
        if block.tokens != tokens or block.parent_hash != parent_hash:
            return None
        return block_id

    def allocate(self, slot: int, kind: BlockOpKind = BlockOpKind.ALLOCATE) -> int:
        """Take the block that was free the longest, dropping its hash if it has one."""
        block_id, _ = self._free.popitem(last=False)
        block = self.blocks[block_id]
        if block.block_hash is not None:
            self._evict(block, slot)
        block.ref_cnt = 1
        self.ops.append(BlockOp(kind, block_id, slot))
        return block_id

    def touch(self, block_id: int, slot: int) -> None:
        """Add a reference to a block found by hash."""
        block = self.blocks[block_id]
        if block.ref_cnt == 0:
            del self._free[block_id]
            self._num_cached -= 1
        block.ref_cnt += 1
        self.ops.append(BlockOp(BlockOpKind.HIT, block_id, slot))

    def store_hash(
        self, block_id: int, slot: int, block_hash: bytes, parent_hash: bytes, tokens: bytes
    ) -> bool:
        """Publish a full, written block; whether that was new: the same content may be published already."""
        block = self.blocks[block_id]
        if block.block_hash is not None:
            raise EngineInvariantError(f"block {block_id} has a hash already")
        if block_hash in self._by_hash:
            return False
        block.block_hash, block.parent_hash, block.tokens = block_hash, parent_hash, tokens
        self._by_hash[block_hash] = block_id
        self.ops.append(
            BlockOp(BlockOpKind.STORE, block_id, slot, int.from_bytes(block_hash[:HASH_PREFIX_BYTES], "big"))
        )
        return True

    def free(self, block_ids: list[int], slot: int, cause: FreeCause) -> int:
        """Drop one reference from each block; return how many became available.

        Blocks become available in the order given, so the first is evicted first: pass the tail of
        a chain first, since a chain without its head cannot be hit.
        """
        num_released = 0
        for block_id in block_ids:
            block = self.blocks[block_id]
            if block.ref_cnt < 1:
                raise EngineInvariantError(f"block {block_id} is freed twice")
            block.ref_cnt -= 1
            block.last_slot = slot
            self.ops.append(BlockOp(BlockOpKind.FREE, block_id, slot, cause))
            if block.ref_cnt == 0:
                num_released += 1
                self._free[block_id] = None
                if block.block_hash is None:
                    # Blank blocks are taken before cached ones: evicting costs a future hit.
                    self._free.move_to_end(block_id, last=False)
                else:
                    self._num_cached += 1
        return num_released

    def _evict(self, block: KVCacheBlock, slot: int) -> None:
        if block.block_hash is None:
            raise EngineInvariantError(f"block {block.block_id} has no hash to drop")
        self.on_evict(block, slot)
        del self._by_hash[block.block_hash]
        block.block_hash, block.parent_hash, block.tokens = None, b"", b""
        self._num_cached -= 1
        self.num_evictions += 1
        self.ops.append(BlockOp(BlockOpKind.EVICT, block.block_id, block.last_slot))

    def would_free(self, tables: Iterable[list[int]], kept: list[int], num_needed: int) -> bool:
        """Whether giving `tables` back would make `num_needed` blocks available, those in `kept` not counted.

        Blocks that have another holder do not count, even if that is another of the tables.
        """
        blocks, kept_ids = self.blocks, set(kept)
        alone = (
            block_id
            for table in tables
            for block_id in table
            if blocks[block_id].ref_cnt == 1 and block_id not in kept_ids
        )
        return sum(1 for _ in islice(alone, num_needed)) == num_needed

    def check_integrity(self) -> None:
        """Raise `EngineInvariantError` if the books do not add up."""
        num_cached = 0
        for block in self.blocks:
            if (block.ref_cnt == 0) != (block.block_id in self._free):
                raise EngineInvariantError(
                    f"block {block.block_id}: {block.ref_cnt=} disagrees with the free list"
                )
            if block.block_hash is not None:
                if self._by_hash.get(block.block_hash) != block.block_id:
                    raise EngineInvariantError(f"block {block.block_id} cannot be found by its hash")
                num_cached += block.ref_cnt == 0
        num_hashed = sum(block.block_hash is not None for block in self.blocks)
        if num_hashed != len(self._by_hash):
            raise EngineInvariantError(f"{num_hashed} blocks have a hash, the index has {len(self._by_hash)}")
        if num_cached != self._num_cached:
            raise EngineInvariantError(f"{num_cached} cached blocks, counted {self._num_cached}")
