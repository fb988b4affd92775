"""What the blocks of recorded sequences held: a fold over block operations, without any token.

A block's hash stands for all tokens up to its end, so sequences whose chains of hashes begin alike share
their beginnings, and tokens made from the hashes behave in the prefix cache as the real ones did.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field

from engine.config import EngineConfig
from engine.records import Admitted, BlockOp, BlockOpKind, Reset, StepRecord

UNKNOWN = 0
"""Stands for a hash that no record tells."""

_ROOT = 0


@dataclass(slots=True)
class _Occupant:
    """Who has a slot; `blocks` are those that it holds with their places in its table."""

    seq_id: int
    blocks: dict[int, int] = field(default_factory=dict)


class BlockChains:
    """Hashes of the full blocks of each sequence, by `seq_id`, as far as records tell them."""

    def __init__(self, config: EngineConfig) -> None:
        """Start with an engine without sequences."""
        self.by_sequence: dict[int, list[int]] = {}
        self.num_guesses = 0
        """Blocks that may have held either of several known contents."""
        self._block_size = config.block_size
        self._is_caching = config.enable_prefix_caching
        self._children: defaultdict[int, list[int]] = defaultdict(list)  # hash -> hashes of blocks after it
        self.forget_blocks()

    def forget_blocks(self) -> None:
        """Go on without knowing what the pool holds: steps are missing, or the engine has started over."""
        self._occupants: dict[int, _Occupant] = {}
        self._hashes: dict[int, int] = {}  # of published blocks
        self._host_hashes: dict[int, int] = {}

    def add(self, record: StepRecord) -> None:
        """Take the next record."""
        newcomers: defaultdict[int, deque[int]] = defaultdict(deque)
        for event in record.events:
            if isinstance(event, Admitted):
                newcomers[event.slot].append(event.seq_id)
        for op in record.block_ops:
            self._take(op, newcomers[op.slot])
        if self._is_caching:
            self._look_for_twins(record)
        if any(isinstance(event, Reset) for event in record.events):
            self.forget_blocks()

    def _take(self, op: BlockOp, newcomers: deque[int]) -> None:
        block_id = op.block_id
        if op.kind == BlockOpKind.EVICT:  # its slot is that of its last owner
            self._hashes.pop(block_id, None)
            return
        occupant = self._occupants.get(op.slot)
        is_taken = op.kind in {BlockOpKind.ALLOCATE, BlockOpKind.LOOKAHEAD, BlockOpKind.HIT}
        if is_taken and newcomers and (occupant is None or not occupant.blocks):
            occupant = self._occupants[op.slot] = _Occupant(newcomers.popleft())
        if occupant is None:  # from before the first record
            occupant = self._occupants[op.slot] = _Occupant(-1)
        if is_taken:
            occupant.blocks[block_id] = len(occupant.blocks)
            if op.kind == BlockOpKind.HIT:
                self._note(occupant, block_id, self._hashes.get(block_id, UNKNOWN))
        elif op.kind == BlockOpKind.STORE:
            self._hashes[block_id] = op.arg
            self._note(occupant, block_id, op.arg)
            self._note_child(occupant, block_id, op.arg)
        elif op.kind == BlockOpKind.FREE:
            occupant.blocks.pop(block_id, None)
        elif op.kind == BlockOpKind.SWAP_OUT:
            index = occupant.blocks.get(block_id, len(occupant.blocks))
            in_chain = self._hash_of(occupant.seq_id, index)
            self._host_hashes[op.arg] = self._hashes.get(block_id, in_chain)
        elif op.kind == BlockOpKind.SWAP_IN:
            self._note(occupant, block_id, self._host_hashes.get(op.arg, UNKNOWN))

    def _note(self, occupant: _Occupant, block_id: int, block_hash: int) -> None:
        """Remember what one block of a sequence holds."""
        index = occupant.blocks.get(block_id)
        if index is not None and block_hash != UNKNOWN and occupant.seq_id >= 0:
            self._put(occupant.seq_id, index, block_hash)

    def _put(self, seq_id: int, index: int, block_hash: int) -> None:
        chain = self.by_sequence.setdefault(seq_id, [])
        chain.extend([UNKNOWN] * (index + 1 - len(chain)))
        chain[index] = block_hash

    def _note_child(self, occupant: _Occupant, block_id: int, block_hash: int) -> None:
        """Remember which block a new one comes after."""
        index = occupant.blocks.get(block_id)
        if index is None or occupant.seq_id < 0:
            return
        parent = self._hash_of(occupant.seq_id, index - 1) if index else _ROOT
        if index == 0 or parent != UNKNOWN:
            siblings = self._children[parent]
            if block_hash in siblings:
                siblings.remove(block_hash)
            siblings.append(block_hash)

    def _look_for_twins(self, record: StepRecord) -> None:
        """Name full blocks that were not published: others with the same tokens were there already."""
        order = {entry.slot: position for position, entry in enumerate(record.batch)}
        stored = {op.arg: order.get(op.slot, -1) for op in record.block_ops if op.kind == BlockOpKind.STORE}
        present: set[int] | None = None
        for position, entry in enumerate(record.batch):
            first = entry.num_computed_before // self._block_size
            last = (entry.num_computed_before + entry.num_scheduled) // self._block_size
            for index in range(first, last):
                if self._hash_of(entry.seq_id, index) == UNKNOWN:
                    present = set(self._hashes.values()) if present is None else present
                    earlier = present - {block for block, place in stored.items() if place > position}
                    self._name_twin(entry.seq_id, index, earlier)

    def _name_twin(self, seq_id: int, index: int, present: set[int]) -> None:
        """The twin is a block after the same parent; of several, it is likely the newest."""
        parent = self._hash_of(seq_id, index - 1) if index else _ROOT
        if index and parent == UNKNOWN:
            return
        twins = [block_hash for block_hash in self._children.get(parent, ()) if block_hash in present]
        if twins:
            self.num_guesses += len(twins) > 1
            self._put(seq_id, index, twins[-1])

    def _hash_of(self, seq_id: int, index: int) -> int:
        chain = self.by_sequence.get(seq_id, ())
        return chain[index] if index < len(chain) else UNKNOWN
