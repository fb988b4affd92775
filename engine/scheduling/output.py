"""The decision of one step: what runs, what is copied, and why no more."""

from dataclasses import dataclass, field

from engine.kv.loads import Load
from engine.records import StopReason
from engine.sequence import Sequence


@dataclass(slots=True)
class ScheduledSequence:
    """A sequence's share of the step. The runner reads `sequence` and never changes it.

    Tokens [num_computed_tokens, num_computed_tokens + num_scheduled_tokens) are to be computed; all
    blocks they need are in `sequence.block_table`.
    """

    sequence: Sequence
    num_computed_tokens: int
    num_scheduled_tokens: int

    @property
    def needs_sampling(self) -> bool:
        """Whether the chunk ends at the last known token, so that a next one is due."""
        return self.num_computed_tokens + self.num_scheduled_tokens == self.sequence.num_tokens


@dataclass(slots=True)
class SchedulerOutput:
    """What one step computes and copies. `scheduled` is in running order and may be empty.

    `swap_outs` are (block, host block): the runner reads each block before it writes it in this or a later
    step. `loads` go the other way, and may take until a later step; nothing computes with their blocks
    before the runner has reported them. All copies happen in the order given, those of a step's `swap_outs`
    before its `loads`. `awaited_loads`: ids of loads that the runner shall finish in this step, since there
    is nothing else to do, or since they are overdue.
    """

    scheduled: list[ScheduledSequence] = field(default_factory=list)
    stop_reason: StopReason = StopReason.QUEUE_EMPTY
    prefix_pending: list[int] = field(default_factory=list)
    swap_outs: list[tuple[int, int]] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    awaited_loads: list[int] = field(default_factory=list)
