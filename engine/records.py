"""The step record: everything that changed in one step, exact, in order.

The engine's visible state is a pure fold over these records (`engine.snapshot`). Every change of
state is in exactly one record, and records are numbered without gaps: `kind` STEP is a scheduling
step, `kind` CONTROL is a change between steps (an abort while idle, say).

All structs are immutable and safe to pass between threads. `gc=False`: they hold no cycles, and 64
of them a step would otherwise keep the collector busy.
"""

from enum import IntEnum

import msgspec


class RecordKind(IntEnum):
    """What a record is about."""

    STEP = 0
    CONTROL = 1


class StopReason(IntEnum):
    """Why the scheduler admitted no further request in this step."""

    QUEUE_EMPTY = 0
    TOKEN_BUDGET = 1
    MAX_NUM_SEQS = 2
    NO_FREE_BLOCKS = 3
    WATERMARK = 4
    PRIORITY = 5
    PREFIX_PENDING = 6
    PAUSED = 7
    PROMPT_ENDS = 8


class BlockOpKind(IntEnum):
    """What happened to a block."""

    ALLOCATE = 0
    """Taken from the free list for `slot`; appended to its block table."""
    LOOKAHEAD = 1
    """Like ALLOCATE, ahead of need."""
    STORE = 2
    """Full and written: its hash is published (`arg` = first 8 bytes of the hash) and it can be shared."""
    HIT = 3
    """Found in the prefix cache for `slot`; appended to its block table."""
    FREE = 4
    """Removed from the block table of `slot`; `arg` is a `FreeCause`."""
    EVICT = 5
    """A cached, unused block lost its hash because its memory was needed; `slot` = its last owner."""
    SWAP_OUT = 6
    """Its content is copied to the host tier (`arg` = host block) before anything else happens to it."""
    SWAP_IN = 7
    """Just allocated; what a host block (`arg`) holds is on its way into it. `Loaded` says when it came."""


class FreeCause(IntEnum):
    """Why a sequence gave a block back."""

    FINISHED = 0
    PREEMPTED = 1
    ABORTED = 2
    UNUSED_LOOKAHEAD = 3


class BlockOp(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One operation on one block, on behalf of the sequence in `slot` (-1: nobody)."""

    kind: int
    block_id: int
    slot: int
    arg: int = 0


class BatchEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One sequence's share of the step.

    Tokens [num_computed_before, num_computed_before + num_scheduled) were computed. `token_id` is
    the token sampled at the end, -1 when the chunk did not reach the sequence's last token.
    """

    seq_id: int
    slot: int
    num_computed_before: int
    num_scheduled: int
    token_id: int = -1

    @property
    def is_decode(self) -> bool:
        """Whether to show it as decode: one token, the last known one. Everything else is prefill."""
        return self.num_scheduled == 1 and self.token_id >= 0


class Arrived(msgspec.Struct, frozen=True, tag="arrived", gc=False):
    """A request was queued. `t_ns`: Unix time in ns at which the engine took it.

    `due_ns`: its place in the queue under the policy "priority": arrival on the engine's own clock plus the
    ageing time for each step of `priority` (lower is more urgent).
    """

    seq_id: int
    request_id: str
    choice_index: int
    num_prompt_tokens: int
    max_tokens: int
    t_ns: int
    priority: int = 0
    due_ns: int = 0


class PrefixMiss(msgspec.Struct, frozen=True, gc=False):
    """Why the prefix cache held no more of a sequence's beginning.

    `kind` is one of these:

    "evicted": the next block was there until step `step`, when `request_id` needed its memory.
    "differs": the longest chain like it goes on with another token at `position`; `request_id` made it.
    "new": nothing like it was there, as far as is remembered.

    `position`: the first token that was not found, or the first one that differs.
    """

    kind: str
    position: int
    step: int = 0
    request_id: str = ""


class Admitted(msgspec.Struct, frozen=True, tag="admitted", gc=False):
    """A waiting sequence got a slot and blocks.

    `num_tokens` were to be computed, `num_cached_tokens` of them came from the prefix cache and
    `num_host_tokens` are on their way from the host tier; until `Loaded` the sequence is not scheduled.
    `resumed`: it had been preempted before. `miss`: why no more was cached, None where all that can be was.
    """

    seq_id: int
    slot: int
    num_tokens: int
    num_cached_tokens: int
    resumed: bool
    num_host_tokens: int = 0
    miss: PrefixMiss | None = None


class Loaded(msgspec.Struct, frozen=True, tag="loaded", gc=False):
    """What an admitted sequence had in the host tier has come back.

    `num_tokens`: tokens whose KV it now has. `num_steps`: steps since its admission, that one included.
    `waited`: some step had nothing else to compute and waited for it. `is_orphan`: the sequence, whose slot
    this was, has ended meanwhile, and its blocks are given back only now.
    """

    seq_id: int
    slot: int
    num_tokens: int
    num_blocks: int
    num_steps: int
    waited: bool
    is_orphan: bool = False


class Preempted(msgspec.Struct, frozen=True, tag="preempted"):
    """A running sequence lost its blocks and waits again.

    `candidates`: every sequence that could have been the victim with the policy's score; the lowest score is
    taken, of equal ones the newest arrival; under the policy "priority" among the least urgent.
    `beneficiary`: the sequence whose need caused it. `need`: "block" where that runs and needed a block,
    "slot" or "room" (blocks) where it waited and is more urgent; empty in older records.
    `mode`: "recompute" or "swap". `num_tokens_lost`: computed tokens that are thrown away; with "swap" only
    those of the last, unfinished block, and `num_tokens_kept` wait in the host tier. `recompute_ns` and
    `swap_ns`: what the two modes were reckoned to take (0: not reckoned).
    """

    seq_id: int
    slot: int
    policy: str
    mode: str
    num_tokens_lost: int
    num_blocks_freed: int
    beneficiary: int
    candidates: list[tuple[int, float]]
    num_tokens_kept: int = 0
    recompute_ns: float = 0.0
    swap_ns: float = 0.0
    need: str = ""


class Finished(msgspec.Struct, frozen=True, tag="finished", gc=False):
    """A sequence ended. `slot` is -1 when it was waiting."""

    seq_id: int
    slot: int
    reason: str
    num_output_tokens: int


class Rejected(msgspec.Struct, frozen=True, tag="rejected", gc=False):
    """A request was refused before it was queued."""

    request_id: str
    choice_index: int
    num_prompt_tokens: int
    code: str


class Reset(msgspec.Struct, frozen=True, tag="reset", gc=False):
    """The engine failed and was rebuilt: no sequences, all blocks free and blank."""

    error: str


class Policies(msgspec.Struct, frozen=True, tag="policies", gc=False):
    """The scheduler's policies from here on; written when somebody changes them."""

    policy: str
    preemption: str
    preemption_mode: str


class Stalled(msgspec.Struct, frozen=True, tag="stalled", gc=False):
    """There was work but nothing to do: a bug. `seq_id`, first in the queue, ends so that others go on."""

    seq_id: int
    num_running: int
    num_waiting: int
    num_available: int


Event = Arrived | Admitted | Loaded | Preempted | Finished | Rejected | Reset | Policies | Stalled


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """All that changed in step `step`.

    `t_ns` is the start in Unix nanoseconds. Durations are in nanoseconds: `schedule_ns` deciding,
    `forward_ns` the model, `sample_ns` choosing tokens, `host_ns` all the rest of the step.
    Counts (`num_*`) are those after the step; `num_free` are blank blocks, `num_cached` unreferenced
    blocks with a hash, `num_used` referenced blocks, and the three add up to the pool.
    `prefix_pending` are the waiting sequences that wait for a running one to finish computing their
    shared prefix; every other waiting sequence waits for `stop_reason`. `num_host_used` host blocks hold
    something, `num_host_pinned` of them what a preempted sequence comes back for or a copy reads.
    """

    step: int
    kind: int
    t_ns: int
    schedule_ns: int
    forward_ns: int
    sample_ns: int
    host_ns: int
    batch: list[BatchEntry]
    block_ops: list[BlockOp]
    events: list[Event]
    stop_reason: int
    prefix_pending: list[int]
    token_budget: int
    num_running: int
    num_waiting: int
    num_free: int
    num_cached: int
    num_used: int
    num_host_used: int = 0
    num_host_pinned: int = 0


FAILED_TOKEN_ID = -2
"""What a runner gives where no token could be chosen: that sequence ends with an error, the step does not."""


class TokenOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the caller of the engine gets for one sequence from one step.

    `token_id` is -1 when the sequence ended without a new token. `finish_reason` is None while it
    goes on. `num_cached_tokens` is that of the first admission.
    """

    seq_id: int
    request_id: str
    choice_index: int
    token_id: int
    finish_reason: str | None = None
    num_cached_tokens: int = 0


class StepResult(msgspec.Struct, frozen=True):
    """One record and the tokens that came with it."""

    record: StepRecord
    outputs: list[TokenOutput]
