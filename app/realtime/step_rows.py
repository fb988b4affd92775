"""What a step leaves on the timeline: its 64-byte row and its marks (docs/wire.md)."""

import struct

from app.realtime.frames import NO_ID, NO_SLOT, MarkKind
from engine.records import (
    Admitted,
    BlockOp,
    BlockOpKind,
    Event,
    Finished,
    FreeCause,
    Loaded,
    Policies,
    Preempted,
    Rejected,
    Reset,
    Stalled,
    StepRecord,
)
from engine.sequence import FinishReason

_ROW_FLAG_RESET = 1
_ROW_FLAG_POLICIES = 2
_ROW_FLAG_STALLED = 4
_ROW_FLAG_WAITED = 8
_ROW_FLAG_SWAPPED_OUT = 16
_ROW_FLAG_SWAPPED_IN = 32
_ROW_SWAPS_SHIFT = 8
_MAX_U8 = 0xFF
_MAX_U16 = 0xFFFF
_NS_PER_MS = 1e6

_ROW = struct.Struct("<IBBHd4f2I4H2I4H")
_MARK = struct.Struct("<IBBHII")

_OP_MARKS = {
    int(BlockOpKind.ALLOCATE): MarkKind.ALLOCATE,
    int(BlockOpKind.LOOKAHEAD): MarkKind.LOOKAHEAD,
    int(BlockOpKind.HIT): MarkKind.HIT,
    int(BlockOpKind.EVICT): MarkKind.EVICT,
    int(BlockOpKind.SWAP_OUT): MarkKind.SWAP_OUT,
    int(BlockOpKind.SWAP_IN): MarkKind.SWAP_IN,
}
_OTHER_MARKS = {Rejected: MarkKind.REJECT, Reset: MarkKind.RESET, Policies: MarkKind.POLICIES}


def encode_row(record: StepRecord) -> bytes:
    """Encode the 64-byte step row of a record."""
    prefill_tokens = prefill_seqs = decode_seqs = 0
    for entry in record.batch:
        if entry.is_decode:
            decode_seqs += 1
        else:
            prefill_seqs += 1
            prefill_tokens += entry.num_scheduled
    preempted, finished, flags = _count_events(record.events)
    evictions, hits, op_flags = _count_ops(record.block_ops)
    return _ROW.pack(
        record.step,
        record.kind,
        record.stop_reason,
        flags | op_flags,
        record.t_ns / _NS_PER_MS,
        record.schedule_ns / _NS_PER_MS,
        record.forward_ns / _NS_PER_MS,
        record.sample_ns / _NS_PER_MS,
        record.host_ns / _NS_PER_MS,
        prefill_tokens,
        decode_seqs,  # a decode is one token
        min(prefill_seqs, _MAX_U16),
        min(decode_seqs, _MAX_U16),
        min(record.num_running, _MAX_U16),
        min(record.num_waiting, _MAX_U16),
        record.num_free,
        record.num_cached,
        min(preempted, _MAX_U16),
        min(finished, _MAX_U16),
        min(evictions, _MAX_U16),
        min(hits, _MAX_U16),
    )


def _count_events(events: list[Event]) -> tuple[int, int, int]:
    """Return preemptions, ends, and what of the row's flags is in events."""
    preempted = finished = swaps = flags = 0
    for event in events:
        match event:
            case Preempted():
                preempted += 1
                swaps += event.num_tokens_kept > 0
            case Finished():
                finished += 1
            case Reset():
                flags |= _ROW_FLAG_RESET
            case Policies():
                flags |= _ROW_FLAG_POLICIES
            case Stalled():
                flags |= _ROW_FLAG_STALLED
            case Loaded():
                flags |= _ROW_FLAG_WAITED if event.waited else 0
    return preempted, finished, flags | min(swaps, _MAX_U8) << _ROW_SWAPS_SHIFT


def _count_ops(block_ops: list[BlockOp]) -> tuple[int, int, int]:
    """Return evictions, hits, and what of the row's flags is in block operations."""
    evictions = hits = flags = 0
    for op in block_ops:
        if op.kind == BlockOpKind.EVICT:
            evictions += 1
        elif op.kind == BlockOpKind.HIT:
            hits += 1
        elif op.kind == BlockOpKind.SWAP_OUT:
            flags |= _ROW_FLAG_SWAPPED_OUT
        elif op.kind == BlockOpKind.SWAP_IN:
            flags |= _ROW_FLAG_SWAPPED_IN
    return evictions, hits, flags


def encode_marks(record: StepRecord) -> bytes:
    """Encode what happened to blocks and sequences in a step, block operations first."""
    marks = [_encode_op(record.step, op) for op in record.block_ops]
    marks += [_encode_event(record.step, event) for event in record.events]
    return b"".join(marks)


def _encode_op(step: int, op: BlockOp) -> bytes:
    kind = _OP_MARKS.get(op.kind)
    if kind is None:
        if op.kind != BlockOpKind.FREE or op.arg != FreeCause.PREEMPTED:
            return b""
        kind = MarkKind.FREED_BY_PREEMPTION
    return _MARK.pack(step, kind, 0, op.slot & NO_SLOT, op.block_id, NO_ID)


def _encode_event(step: int, event: Event) -> bytes:
    slot, seq_id, detail = -1, -1, 0
    match event:
        case Rejected() | Reset() | Policies():
            kind = _OTHER_MARKS[type(event)]
        case Admitted():
            kind, slot, seq_id = MarkKind.ADMIT, event.slot, event.seq_id
        case Loaded():
            kind, slot, seq_id, detail = MarkKind.LOADED, event.slot, event.seq_id, event.waited
        case Preempted():
            kind, slot, seq_id = MarkKind.PREEMPT, event.slot, event.seq_id
            detail = event.num_tokens_kept > 0
        case Finished():
            kind = MarkKind.ABORT if event.reason == FinishReason.ABORT else MarkKind.FINISH
            slot, seq_id = event.slot, event.seq_id
        case Stalled():
            kind, seq_id = MarkKind.STALLED, event.seq_id
        case _:  # an arrival is seen in the queue's length
            return b""
    return _MARK.pack(step, kind, detail, slot & NO_SLOT, NO_ID, seq_id & NO_ID)
