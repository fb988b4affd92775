"""A step as arrays: what the host prepares from a schedule, and the same on the device that computes.

Rows are tokens, in any number of sequences ("a ragged batch"). Sequences that compute one token come first,
by length of context, then the longer chunks.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(slots=True)
class StepInputs:
    """A step on the host; all arrays are int32.

    `input_ids`, `positions` and `slot_mapping` (tokens): what is computed, where in its sequence, and the
    slot (`block_id * block_size + offset`) that its keys and values go to. `query_starts` (sequences + 1):
    the first row of each sequence. `context_lens` (sequences): tokens of each, those of this step included.
    `block_tables` (sequences, width): padded with each table's first block. `logits_rows` (wanted): rows
    whose logits are wanted, in the order in which they are wanted. The first `num_decodes` sequences compute
    one token. `block_size`: tokens of a block.
    """

    input_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    slot_mapping: NDArray[np.int32]
    query_starts: NDArray[np.int32]
    context_lens: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    logits_rows: NDArray[np.int32]
    num_decodes: int
    block_size: int

    @property
    def num_sequences(self) -> int:
        """Sequences in the step."""
        return len(self.context_lens)


@dataclass(slots=True)
class ForwardBatch:
    """A step on the device: the arrays of `StepInputs` as int32 tensors of the same names.

    `max_query_len` and `max_context_len` bound the tokens that a sequence computes and has, as far as the
    host knows. `plan` is whatever the attention backend has made of the step. `has_padding`: rows at the end
    may belong to no sequence; their slots are -1, the contexts of their sequences 0. `angles`: the rotary
    cosines and sines of its rows, once they were looked up.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    logits_rows: Tensor
    num_decodes: int
    max_query_len: int
    max_context_len: int
    plan: object = None
    has_padding: bool = False
    angles: tuple[Tensor, Tensor] | None = None


def to_device(inputs: StepInputs, device: torch.device) -> ForwardBatch:
    """Return a step on the device, without a plan."""

    def move(array: NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return ForwardBatch(
        input_ids=move(inputs.input_ids),
        positions=move(inputs.positions),
        slot_mapping=move(inputs.slot_mapping),
        query_starts=move(inputs.query_starts),
        context_lens=move(inputs.context_lens),
        block_tables=move(inputs.block_tables),
        logits_rows=move(inputs.logits_rows),
        num_decodes=inputs.num_decodes,
        max_query_len=int(np.diff(inputs.query_starts).max()),
        max_context_len=int(inputs.context_lens.max()),
    )
