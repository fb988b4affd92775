"""The decision of a step as arrays: which rows, at which positions, in which slots.

Rows are ordered for the attention: first the sequences that compute one token, by length of context,
then the longer chunks. `logits_rows` undoes the order: its entries follow the scheduled sequences.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.model.step import StepInputs
from engine.scheduling.output import ScheduledSequence


class Rows(NamedTuple):
    """Where the tokens of a batch lie; all int32.

    `counts` and `contexts` (sequences): tokens that are computed, tokens that are there afterwards.
    `starts` (sequences + 1): first rows. `positions` and `sequences` (tokens): of each row.
    """

    counts: NDArray[np.int32]
    contexts: NDArray[np.int32]
    starts: NDArray[np.int32]
    positions: NDArray[np.int32]
    sequences: NDArray[np.int32]


def lay_out(spans: list[tuple[int, int]]) -> Rows:
    """Return the rows for `spans`, (first position, number of tokens) of each sequence."""
    firsts, counts = np.array(spans, np.int32).T  # 2 * (sequences)
    starts = np.zeros(len(spans) + 1, np.int32)  # (sequences + 1)
    np.cumsum(counts, out=starts[1:])
    sequences = np.repeat(np.arange(len(spans), dtype=np.int32), counts)  # (tokens)
    positions = np.arange(starts[-1], dtype=np.int32)  # (tokens)
    positions += (firsts - starts[:-1])[sequences]
    return Rows(counts, firsts + counts, starts, positions, sequences)


def row_order(start: int, count: int) -> tuple[bool, int]:
    """Return what sequences are sorted by: single tokens first, by context."""
    return count > 1, start


def make_inputs(scheduled: list[ScheduledSequence], block_size: int) -> StepInputs:
    """Return the arrays of a step; `scheduled` must not be empty."""
    spans = [(entry.num_computed_tokens, entry.num_scheduled_tokens) for entry in scheduled]
    order = sorted(range(len(scheduled)), key=lambda i: row_order(*spans[i]))
    ordered = [scheduled[i] for i in order]
    rows = lay_out([spans[i] for i in order])
    tables = _pad_tables(ordered, block_size)  # (sequences, width) int32
    last_rows = dict(zip(order, (rows.starts[1:] - 1).tolist(), strict=True))
    wanted = [last_rows[i] for i, entry in enumerate(scheduled) if entry.needs_sampling]
    return StepInputs(
        input_ids=np.array(_list_tokens(ordered), np.int32),
        positions=rows.positions,
        slot_mapping=find_slots(tables[rows.sequences, rows.positions // block_size], rows, block_size),
        query_starts=rows.starts,
        context_lens=rows.contexts,
        block_tables=tables,
        logits_rows=np.array(wanted, np.int32),
        num_decodes=int((rows.counts == 1).sum()),
        block_size=block_size,
    )


def find_slots(blocks: NDArray[np.int32], rows: Rows, block_size: int) -> NDArray[np.int32]:
    """Return the slots (tokens) of rows whose blocks (tokens) are known."""
    return blocks * np.int32(block_size) + rows.positions % np.int32(block_size)


def _list_tokens(ordered: list[ScheduledSequence]) -> list[int]:
    input_ids: list[int] = []
    for entry in ordered:
        start = entry.num_computed_tokens
        input_ids += entry.sequence.token_ids[start : start + entry.num_scheduled_tokens]
    return input_ids


def _pad_tables(ordered: list[ScheduledSequence], block_size: int) -> NDArray[np.int32]:
    """Return the block tables as far as the step needs them, padded with each table's first block."""
    needed = [-(-(e.num_computed_tokens + e.num_scheduled_tokens) // block_size) for e in ordered]
    width = max(needed)
    rows = []
    for entry, count in zip(ordered, needed, strict=True):
        table = entry.sequence.block_table[:count]
        assert len(table) == count, f"{entry.sequence} has no block for a token of this step"
        rows.append(table + table[:1] * (width - count))
    return np.array(rows, np.int32)  # (sequences, width)
