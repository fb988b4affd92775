"""What can be seen of blocks and sequences: the plain data that `engine.snapshot` gives out."""

from enum import IntEnum

import msgspec


class BlockState(IntEnum):
    """What a block is to the eye."""

    FREE = 0
    """Blank."""
    CACHED = 1
    """Unreferenced, but can be found by hash until it is evicted."""
    ACTIVE = 2
    """Held by one sequence, full."""
    TAIL = 3
    """Held by one sequence, not full."""
    SHARED = 4
    """Held by two or more sequences."""
    RESERVED = 5
    OFFLOADED = 6


class BlockView(msgspec.Struct, frozen=True, gc=False):
    """One block. `slot`: the oldest holder's, for a cached block the last holder's, else -1.

    `owner` is the oldest holder's seq_id or -1; `filled` counts tokens; `hash` is the first 8 bytes of
    the block hash, 0 without one.
    """

    state: BlockState
    ref_cnt: int
    slot: int
    owner: int
    filled: int
    hash: int


class SequenceView(msgspec.Struct):
    """One open sequence; `slot` is -1 while it waits, `reason` says for what."""

    seq_id: int
    request_id: str
    choice_index: int
    num_prompt_tokens: int
    max_tokens: int
    arrived_ns: int
    num_tokens: int
    slot: int = -1
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    block_table: list[int] = []
    reason: str | None = None

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens."""
        return self.num_tokens - self.num_prompt_tokens


class Totals(msgspec.Struct):
    """Counts since the first record."""

    num_arrived: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_failed: int = 0
    num_rejected: int = 0
    num_preemptions: int = 0
    num_evictions: int = 0
    num_lookup_tokens: int = 0
    """Prompt tokens of first admissions."""
    num_hit_tokens: int = 0
    """Of those, found in the prefix cache."""
    num_tokens_lost: int = 0
    """Computed tokens thrown away by preemptions."""
    num_recomputed_tokens: int = 0
    """Tokens that had to be computed again after a preemption: lost ones less those still cached."""
    num_prefill_tokens: int = 0
    """Tokens computed in entries that are not shown as decode (`BatchEntry.is_decode`)."""
    num_output_tokens: int = 0
    num_resets: int = 0
