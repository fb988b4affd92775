"""What to do when a step needs more memory than there is: compute it in parts, or fail what cannot be."""

import logging
from collections.abc import Callable

import torch

from engine.records import FAILED_TOKEN_ID
from engine.scheduling.output import ScheduledSequence

logger = logging.getLogger(__name__)

_MEMORY_SIGNS = ("allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""In errors that are no `OutOfMemoryError`: of the CPU's memory, pinned memory, graphs, libraries, Triton."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether this is one of the errors by which torch and Python say that memory does not suffice."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _MEMORY_SIGNS)


def compute_smaller(
    scheduled: list[ScheduledSequence],
    compute: Callable[[list[ScheduledSequence]], list[int]],
) -> list[int]:
    """Return a step's tokens, computed in halves of halves until they fit.

    A single token that does not fit fails its sequence alone (`FAILED_TOKEN_ID`). Halves of a sequence are
    computed one after the other, so that the second one finds the keys and values of the first.
    """
    token_ids = {entry.sequence.seq_id: -1 for entry in scheduled}
    parts = _halve(scheduled)[::-1] or [scheduled]
    while parts:
        part = [entry for entry in parts.pop() if token_ids[entry.sequence.seq_id] != FAILED_TOKEN_ID]
        if not part:
            continue
        try:
            computed = compute(part)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            halves = _halve(part)
            if not halves:
                logger.warning("No memory for even one token of request %s", part[0].sequence.request_id)
                token_ids[part[0].sequence.seq_id] = FAILED_TOKEN_ID
            parts += halves[::-1]
        else:
            token_ids.update(zip((entry.sequence.seq_id for entry in part), computed, strict=True))
    return [token_ids[entry.sequence.seq_id] for entry in scheduled]


def _halve(scheduled: list[ScheduledSequence]) -> list[list[ScheduledSequence]]:
    """Return two halves of a batch, or of its only sequence; none of a single token."""
    if len(scheduled) > 1:
        middle = len(scheduled) // 2
        return [scheduled[:middle], scheduled[middle:]]
    (entry,) = scheduled
    if entry.num_scheduled_tokens == 1:
        return []
    first = entry.num_scheduled_tokens // 2
    return [
        [ScheduledSequence(entry.sequence, entry.num_computed_tokens, first)],
        [
            ScheduledSequence(
                entry.sequence, entry.num_computed_tokens + first, entry.num_scheduled_tokens - first
            )
        ],
    ]
