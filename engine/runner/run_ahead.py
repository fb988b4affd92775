"""What a runner has computed ahead of the scheduler, and which of it the scheduler then wants."""

from dataclasses import dataclass

from engine.runner.launcher import PendingTokens
from engine.runner.shares import Share
from engine.scheduling.output import ScheduledSequence
from engine.sequence import Sequence


def shares_ahead(scheduled: list[ScheduledSequence], block_size: int) -> list[Share]:
    """Return the next token of each sequence that goes on after a step, if that is all as usual.

    Not of one whose last token this will be, and not where the block for it is not there yet.
    """
    shares = []
    for entry in scheduled:
        sequence = entry.sequence
        position = sequence.num_tokens  # of the token that this step samples
        if (
            entry.needs_sampling
            and position + 1 < sequence.max_num_tokens
            and position < len(sequence.block_table) * block_size
        ):
            shares.append(Share(sequence, position, 1, is_wanted=True, is_ahead=True))
    return shares


@dataclass(frozen=True, slots=True)
class _Row:
    """Where a token was computed: by which preemption of the sequence, at which position, in which block."""

    num_preemptions: int
    position: int
    block_id: int


class RunAhead:
    """One launch that nobody has asked for yet."""

    def __init__(self, pending: PendingTokens, block_size: int) -> None:
        """Take a launch of `shares_ahead`."""
        self.pending = pending
        self._block_size = block_size
        self._rows = {
            share.sequence.seq_id: self._describe(share.sequence, share.start) for share in pending.wanted
        }

    def _describe(self, sequence: Sequence, position: int) -> _Row:
        return _Row(sequence.num_preemptions, position, sequence.block_table[position // self._block_size])

    def drop(self, seq_id: int) -> None:
        """Do not believe a row: the token that it was computed from was another one."""
        self._rows.pop(seq_id, None)

    def has(self, entry: ScheduledSequence) -> bool:
        """Whether it has computed just this."""
        row = self._rows.get(entry.sequence.seq_id)
        return (
            row is not None
            and entry.num_scheduled_tokens == 1
            and row == self._describe(entry.sequence, entry.num_computed_tokens)
        )
