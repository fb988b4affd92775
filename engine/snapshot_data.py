"""The forms in which an `EngineSnapshot` leaves the engine: as data to be kept, and as JSON."""

import sys
from array import array
from collections.abc import Iterable
from typing import Any

import msgspec

from engine.records import Policies, StepRecord, StopReason
from engine.views import SequenceView, Totals


class SnapshotState(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An `EngineSnapshot` as plain data that can be encoded: nothing in it is shared with the snapshot.

    Arrays have one little-endian number for each block: `filled` u16, `hashes` u64, `last_slots` i32.
    """

    step: int
    t_ns: int
    totals: Totals
    sequences: list[SequenceView]
    running: list[int]
    """Their seq_ids in order of admission."""
    tables: dict[int, list[int]]
    """Slot to blocks."""
    holders: dict[int, list[int]]
    """Block to slots, oldest first."""
    filled: bytes
    hashes: bytes
    last_slots: bytes
    last_record: StepRecord | None
    last_batch: StepRecord | None
    policies: Policies | None = None
    """None: those of the configuration."""


def pack(typecode: str, numbers: Iterable[int]) -> bytes:
    """Return numbers as little-endian bytes; `typecode` is that of `array`."""
    packed = array(typecode, numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack(typecode: str, data: bytes) -> list[int]:
    """Return the numbers that `pack` was given."""
    packed = array(typecode, data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()


def sequence_to_dict(view: SequenceView) -> dict[str, Any]:
    """Describe one open sequence as JSON-able data."""
    data: dict[str, Any] = msgspec.to_builtins(view)
    data["num_output_tokens"] = view.num_output_tokens
    data["num_blocks"] = len(view.block_table)
    return data


def batch_to_dict(record: StepRecord | None) -> dict[str, Any] | None:
    """Describe the newest step that computed something as JSON-able data."""
    if record is None:
        return None
    return {
        "step": record.step,
        "t_ns": record.t_ns,
        "schedule_ms": record.schedule_ns / 1e6,
        "forward_ms": record.forward_ns / 1e6,
        "sample_ms": record.sample_ns / 1e6,
        "host_ms": record.host_ns / 1e6,
        "stop_reason": StopReason(record.stop_reason).name.lower(),
        "token_budget": record.token_budget,
        "num_scheduled_tokens": sum(entry.num_scheduled for entry in record.batch),
        "entries": [
            {
                "seq_id": entry.seq_id,
                "slot": entry.slot,
                "kind": "decode" if entry.is_decode else "prefill",
                "num_computed_before": entry.num_computed_before,
                "num_scheduled": entry.num_scheduled,
            }
            for entry in record.batch
        ],
    }
