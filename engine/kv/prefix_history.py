"""Remembers which cached chains there once were, to explain what the prefix cache did not hold."""

from collections import OrderedDict

from engine.records import PrefixMiss

MIN_REMEMBERED = 4_096
MAX_REMEMBERED = 65_536
MAX_SIBLINGS = 4
"""Chains that are remembered to have gone on differently after one block."""


class PrefixHistory:
    """A bounded memory of published and evicted blocks; the oldest entries are forgotten first."""

    def __init__(self, num_blocks: int) -> None:
        """Remember twice as much as the pool holds, within bounds."""
        self._capacity = min(max(MIN_REMEMBERED, 2 * num_blocks), MAX_REMEMBERED)
        # Hash of a block -> when and for whom it was evicted.
        self._evicted: OrderedDict[bytes, tuple[int, str]] = OrderedDict()
        # Hash of a block -> the newest blocks after it, newest first: their tokens and who made them.
        self._children: OrderedDict[bytes, list[tuple[bytes, str]]] = OrderedDict()

    def note_published(self, parent_hash: bytes, tokens: bytes, block_hash: bytes, request_id: str) -> None:
        """Take note of a new block of a chain."""
        self._evicted.pop(block_hash, None)
        siblings = self._children.get(parent_hash, ())
        others = [sibling for sibling in siblings if sibling[0] != tokens]
        self._children[parent_hash] = [(tokens, request_id), *others[: MAX_SIBLINGS - 1]]
        self._children.move_to_end(parent_hash)
        if len(self._children) > self._capacity:
            self._children.popitem(last=False)

    def note_evicted(self, block_hash: bytes, step: int, request_id: str) -> None:
        """Take note that a block had to go."""
        self._evicted[block_hash] = (step, request_id)
        if len(self._evicted) > self._capacity:
            self._evicted.popitem(last=False)

    def explain(self, block_hash: bytes, parent_hash: bytes, tokens: bytes, first: int) -> PrefixMiss:
        """Say why the block after the hits, whose first token is at position `first`, was not there."""
        if block_hash in self._evicted:
            step, request_id = self._evicted[block_hash]
            return PrefixMiss("evicted", first, step, request_id)
        siblings = self._children.get(parent_hash, [])
        if not siblings or any(tokens == others for others, _ in siblings):  # that one is long forgotten
            return PrefixMiss("new", first)
        position, _, request_id = max(
            (_common_tokens(tokens, others), -age, maker) for age, (others, maker) in enumerate(siblings)
        )
        return PrefixMiss("differs", first + position, 0, request_id)


def _common_tokens(tokens: bytes, others: bytes) -> int:
    """Return how many leading token ids (4 bytes each) are equal."""
    count = 0
    for start in range(0, min(len(tokens), len(others)), 4):
        if tokens[start : start + 4] != others[start : start + 4]:
            break
        count += 1
    return count
