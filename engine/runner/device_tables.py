"""Block tables that stay on the device: a step brings along only what has changed."""

import numpy as np
from numpy.typing import NDArray

from engine.sequence import Sequence

_NOTHING = -1
"""In place of a block: what the device has there is not known."""


class DeviceTables:
    """The host's side: what the device's tables hold, and what they lack.

    Row `slot` is the table of the sequence in that slot; the last row, slot -1, belongs to nobody.
    """

    def __init__(self, max_num_seqs: int, width: int) -> None:
        """Make tables of `width` blocks, all of whose entries are 0."""
        self.host: NDArray[np.int32] = np.zeros((max_num_seqs + 1, width), np.int32)  # (slots + 1, width)
        self._owners: list[tuple[int, int] | None] = [None] * (max_num_seqs + 1)
        self._num_known = [0] * (max_num_seqs + 1)
        self._changes: list[tuple[int, list[int]]] = []

    def update(self, sequence: Sequence, num_computed_tokens: int, num_blocks: int, block_size: int) -> None:
        """Note what the device lacks of the sequence's first `num_blocks` blocks.

        Blocks whose tokens are all computed do not change as long as the sequence is not preempted; the
        others may have been taken back and replaced.
        """
        slot, owner = sequence.slot, (sequence.seq_id, sequence.num_preemptions)
        num_kept = 0
        if self._owners[slot] == owner:
            num_kept = min(self._num_known[slot], num_computed_tokens // block_size)
        self._owners[slot], self._num_known[slot] = owner, num_blocks
        blocks = sequence.block_table[num_kept:num_blocks]
        assert num_kept + len(blocks) == num_blocks, f"{sequence} has no block for a token of this step"
        row = self.host[slot]
        if len(blocks) == 1 and row[num_kept] == blocks[0]:
            return  # the usual case of a decoding sequence
        row[num_kept:num_blocks] = blocks
        self._changes.append((slot % len(self.host) * len(row) + num_kept, blocks))

    def take_changes(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return where the device's tables, as one row, have to change, and to what."""
        changes, self._changes = self._changes, []
        places = [place for start, blocks in changes for place in range(start, start + len(blocks))]
        values = [block_id for _, blocks in changes for block_id in blocks]
        return np.array(places, np.int64), np.array(values, np.int32)

    def forget(self) -> None:
        """Let every sequence's table be sent again."""
        self._owners = [None] * len(self._owners)
        self._changes.clear()
        self.host.fill(_NOTHING)  # changes that were noted may never have been sent
