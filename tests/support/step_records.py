"""Step records made by hand."""

from typing import Any

from engine.records import RecordKind, StepRecord, StopReason

T_NS = 1_700_000_000_000_000_000


def make_record(**overrides: Any) -> StepRecord:
    """Return step 7 of an idle engine of 8 blocks, but for what is given."""
    return StepRecord(
        **{
            "step": 7,
            "kind": RecordKind.STEP,
            "t_ns": T_NS,
            "schedule_ns": 1_000_000,
            "forward_ns": 2_000_000,
            "sample_ns": 500_000,
            "host_ns": 250_000,
            "batch": [],
            "block_ops": [],
            "events": [],
            "stop_reason": StopReason.QUEUE_EMPTY,
            "prefix_pending": [],
            "token_budget": 16,
            "num_running": 0,
            "num_waiting": 0,
            "num_free": 8,
            "num_cached": 0,
            "num_used": 0,
            **overrides,
        }
    )
