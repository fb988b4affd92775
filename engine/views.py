"""What can be seen of blocks and sequences: the plain data that `engine.snapshot` gives out."""

from enum import IntEnum

import msgspec

from engine.records import PrefixMiss


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
    """Held by one sequence ahead of need, or being copied from the host tier: nothing in it is read yet."""
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
    """One open sequence; `slot` is -1 while it waits, `reason` says for what.

    `is_loading`: admitted, but part of its KV is still on its way from the host tier. `miss`: why no more of
    it was cached at its newest admission.
    """

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
    priority: int = 0
    due_ns: int = 0
    is_loading: bool = False
    miss: PrefixMiss | None = None
    num_tokens_before: int = 0
    """Tokens whose KV it had when it was preempted last."""

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
    num_swaps: int = 0
    """Preemptions that kept blocks in the host tier."""
    num_swapped_out: int = 0
    """Blocks copied to the host tier, by preemptions and evictions."""
    num_swapped_in: int = 0
    """Blocks copied back."""
    num_host_tokens: int = 0
    """Tokens that admissions found in the host tier; they were not computed again."""
    num_loads: int = 0
    """Copies from the host tier that have ended, one for each admission that had any."""
    num_loads_hidden: int = 0
    """Those that no step waited for: other sequences computed meanwhile."""
    num_lookahead: int = 0
    """Blocks reserved a step ahead of need."""
    num_lookahead_unused: int = 0
    """Those that were given back unused."""
    num_stalls: int = 0
