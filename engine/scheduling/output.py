"""The decision of one step: what runs, and why no more."""

from dataclasses import dataclass, field

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
    """What one step computes. `scheduled` is in running order and may be empty."""

    scheduled: list[ScheduledSequence] = field(default_factory=list)
    stop_reason: StopReason = StopReason.QUEUE_EMPTY
    prefix_pending: list[int] = field(default_factory=list)
