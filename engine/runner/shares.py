"""What the CUDA runner computes in one launch: shares of sequences, as arrays."""

from collections.abc import Sequence as List
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.model.sampler import Draw, DrawArrays, list_draws
from engine.model.step import StepInputs
from engine.runner.batch import find_slots, lay_out, row_order
from engine.runner.device_tables import DeviceTables
from engine.scheduling.output import ScheduledSequence
from engine.sequence import Sequence

UNKNOWN_TOKEN_ID = -1
"""Stands for a token that only the device knows yet."""

NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class Share:
    """Tokens [start, start + count) of a sequence; `is_wanted`: whether the next one is sampled.

    `is_ahead`: the token to compute is the one that the device has just sampled.
    """

    sequence: Sequence
    start: int
    count: int
    is_wanted: bool
    is_ahead: bool = False

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + self.count

    def make_draw(self) -> Draw:
        """Return how its next token is chosen."""
        sequence = self.sequence
        return Draw(sequence.sampling_params, sequence.choice_index, self.end - sequence.num_prompt_tokens)


def share_of(entry: ScheduledSequence) -> Share:
    """Return what a step computes of a sequence."""
    return Share(entry.sequence, entry.num_computed_tokens, entry.num_scheduled_tokens, entry.needs_sampling)


@dataclass(slots=True)
class Launch:
    """The arrays of some shares: rows that are computed together.

    `slots` (sequences) int32 are their rows in the device's tables. `wanted` are the shares whose next token
    is sampled, in the order of the logits.
    """

    shares: list[Share]
    wanted: list[Share]
    inputs: StepInputs
    slots: NDArray[np.int32]
    draws: DrawArrays | None

    @property
    def is_decode_only(self) -> bool:
        """Whether every sequence computes one token and wants the next one."""
        return self.inputs.num_decodes == len(self.shares) == len(self.wanted)


def make_launch(shares: List[Share], tables: DeviceTables, block_size: int, vocab_size: int) -> Launch:
    """Return the arrays of some shares, single tokens first; notes what the device's tables lack."""
    ordered = sorted(shares, key=lambda share: row_order(share.start, share.count))
    input_ids: list[int] = []
    for share in ordered:
        tables.update(share.sequence, share.start, -(-share.end // block_size), block_size)
        if share.is_ahead:
            input_ids.append(UNKNOWN_TOKEN_ID)
        else:
            input_ids += share.sequence.token_ids[share.start : share.end]
    rows = lay_out([(share.start, share.count) for share in ordered])
    slots = np.array([share.sequence.slot for share in ordered], np.int32)  # (sequences)
    width = -(-int(rows.contexts.max()) // block_size)
    blocks = tables.host[slots[rows.sequences], rows.positions // block_size]  # (tokens) int32
    is_wanted = np.array([share.is_wanted for share in ordered])  # (sequences) bool
    wanted = [share for share in ordered if share.is_wanted]
    inputs = StepInputs(
        input_ids=np.array(input_ids, np.int32),
        positions=rows.positions,
        slot_mapping=find_slots(blocks, rows, block_size),
        query_starts=rows.starts,
        context_lens=rows.contexts,
        block_tables=tables.host[slots, :width],
        logits_rows=rows.starts[1:][is_wanted] - np.int32(1),
        num_decodes=int((rows.counts == 1).sum()),
        block_size=block_size,
    )
    draws = list_draws([share.make_draw() for share in wanted], vocab_size)
    return Launch(ordered, wanted, inputs, slots, draws)
