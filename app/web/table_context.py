"""The pictures of the engine view as tables, for those who do not see them. Plain data, no markup."""

from collections import Counter
from typing import Any

from app.web.live_context import REASON_WORDS, SHOWN_STATES, STATE_WORDS, running_row, short_name
from app.web.templating import format_percent
from engine.records import StopReason
from engine.snapshot import EngineSnapshot
from engine.views import BlockState, SequenceView


def make_tables(snapshot: EngineSnapshot | None) -> dict[str, Any]:
    """Return the pictures as tables: blocks by state and by request, the newest batch and why it ended."""
    if snapshot is None:
        return {"by_state": [], "by_request": [], "num_blocks": 0, "batch": None, "stop_words": ""}
    counts = _count_states(snapshot)
    return {
        "by_state": [
            (state.name.lower(), STATE_WORDS[state], counts[state], format_percent(counts[state], total))
            for state in SHOWN_STATES
            if (total := snapshot.config.num_blocks)
        ],
        "by_request": [_blocks_of(view, snapshot) for view in snapshot.running],
        "num_blocks": snapshot.config.num_blocks,
        "batch": _describe_batch(snapshot),
        "stop_words": _stop_words(snapshot),
    }


def _stop_words(snapshot: EngineSnapshot) -> str:
    record = snapshot.last_record
    return REASON_WORDS[StopReason(record.stop_reason)] if record is not None else ""


def _describe_batch(snapshot: EngineSnapshot) -> dict[str, Any] | None:
    """Return the newest step that computed something, None before the first."""
    record = snapshot.last_batch
    if record is None:
        return None
    entries = []
    for entry in record.batch:
        view = snapshot.sequences.get(entry.seq_id)  # None: it ended in this step
        name = short_name(view) if view else f"sequence {entry.seq_id}, ended"
        entries.append((name, entry.slot, "decode" if entry.is_decode else "prefill", entry.num_scheduled))
    return {"step": record.step, "entries": entries, "num_tokens": sum(entry[-1] for entry in entries)}


def _count_states(snapshot: EngineSnapshot) -> Counter[BlockState]:
    held = {block_id for view in snapshot.running for block_id in view.block_table}
    counts = Counter(snapshot.block(block_id).state for block_id in held)
    counts[BlockState.RESERVED] += snapshot.num_used - len(
        held
    )  # whose sequence ended while they were loaded
    counts[BlockState.FREE] = snapshot.num_free
    counts[BlockState.CACHED] = snapshot.num_cached
    return counts


def _blocks_of(view: SequenceView, snapshot: EngineSnapshot) -> dict[str, Any]:
    counts = Counter(snapshot.block(block_id).state for block_id in view.block_table)
    return {
        "row": running_row(view),
        "num_blocks": len(view.block_table),
        "num_shared": counts[BlockState.SHARED],
        "num_full": counts[BlockState.ACTIVE],
        "num_tail": counts[BlockState.TAIL],
        "num_reserved": counts[BlockState.RESERVED],
    }
