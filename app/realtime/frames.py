"""The binary frames of `WS /ws/engine`: pure functions from step records to bytes (docs/wire.md)."""

import asyncio
import struct
import sys
import zlib
from array import array
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec

from engine.config import EngineConfig
from engine.engine_info import EngineInfo
from engine.records import (
    Admitted,
    BlockOp,
    BlockOpKind,
    Event,
    Finished,
    FreeCause,
    Preempted,
    Rejected,
    Reset,
    StepRecord,
    StopReason,
)
from engine.sequence import FinishReason
from engine.views import BlockState, BlockView

PROTOCOL = 1
ROW_BYTES = 64
MARK_BYTES = 16
CELL_BYTES = 4
ACK_BYTES = 12

MAX_FPS = 60
NO_SLOT = 0xFFFF
NO_ID = 0xFFFFFFFF
DEFLATE_OVER_BYTES = 64 * 1024
"""Smaller keyframes are sent as they are: not worth the time."""

_DEFLATE_SLICE_BYTES = 256 * 1024
_DEFLATE_LEVEL = 1
_FLAG_DEFLATED = 1
_ROW_FLAG_RESET = 1
_TAIL = BlockState.TAIL
_MAX_U8 = 0xFF
_MAX_U16 = 0xFFFF
_NS_PER_MS = 1e6

_HEADER = struct.Struct("<BBHIIIIId")
_ROW = struct.Struct("<IBBHd4f2I4H2I4H")
_ENTRY = struct.Struct("<HBBII")
_MARK = struct.Struct("<IBBHII")
_ACK = struct.Struct("<BBHII")


class FrameKind(IntEnum):
    """What a frame carries."""

    HELLO = 1
    KEYFRAME = 2
    DELTA = 3
    STEPS = 4
    BATCH = 5
    MARKS = 6
    GAP = 7
    ACK = 8


class MarkKind(IntEnum):
    """What happened; the page flashes it on a block or pins it on the timeline."""

    ALLOCATE = 1
    HIT = 2
    EVICT = 3
    FREED_BY_PREEMPTION = 4
    PREEMPT = 5
    FINISH = 6
    ABORT = 7
    REJECT = 8
    RESET = 9
    ADMIT = 10


class Frame(NamedTuple):
    """A frame before it is encoded. `t_ms`: Unix time in ms of its newest step."""

    kind: FrameKind
    payload: bytes = b""
    first_step: int = 0
    n_steps: int = 0
    n_items: int = 0
    t_ms: float = 0.0
    overflow: int = 0
    deflated: bool = False

    def encode(self) -> bytes:
        """Return header, payload and padding to a multiple of 8."""
        header = _HEADER.pack(
            self.kind,
            _FLAG_DEFLATED if self.deflated else 0,
            PROTOCOL,
            len(self.payload),
            self.first_step,
            self.n_steps,
            self.n_items,
            min(self.overflow, NO_ID),
            self.t_ms,
        )
        return b"".join((header, self.payload, bytes(-len(self.payload) % 8)))


class Ack(NamedTuple):
    """What a client reports. `painted`: messages it has painted so far on this connection."""

    fps: int
    hidden: bool
    step: int
    painted: int


# ---------------------------------------------------------------- cells


def pack_cell(view: BlockView) -> int:
    """Pack one block into its 32-bit cell."""
    state = view.state
    aux = view.filled if state is _TAIL else view.ref_cnt
    return (
        int(state)  # operators of an enum are slow
        | (16 if view.hash else 0)
        | (min(_MAX_U8, aux)) << 8
        | (view.slot & NO_SLOT) << 16  # -1 becomes 65535
    )


BLANK_CELL = pack_cell(BlockView(BlockState.FREE, ref_cnt=0, slot=-1, owner=-1, filled=0, hash=0))
"""The cell of every free block."""


def make_keyframe(cells: "array[int]", step: int, t_ms: float) -> Frame:
    """Show all cells (an array of 32-bit words) as of `step`."""
    return Frame(FrameKind.KEYFRAME, _little_endian(cells), step, 1, len(cells), t_ms)


def make_delta(ids: Sequence[int], cells: "array[int]", step: int, t_ms: float) -> Frame:
    """Show the cells of `ids` as of `step`."""
    pairs = array("I", bytes(2 * CELL_BYTES * len(ids)))
    pairs[0::2] = array("I", ids)
    pairs[1::2] = array("I", map(cells.__getitem__, ids))
    return Frame(FrameKind.DELTA, _little_endian(pairs), step, 1, len(ids), t_ms)


def _little_endian(words: "array[int]") -> bytes:
    if sys.byteorder == "big":
        words = words[:]
        words.byteswap()
    return words.tobytes()


# ---------------------------------------------------------------- steps


def encode_row(record: StepRecord) -> bytes:
    """Encode the 64-byte step row of a record."""
    prefill_tokens = prefill_seqs = decode_seqs = 0
    for entry in record.batch:
        if entry.is_decode:
            decode_seqs += 1
        else:
            prefill_seqs += 1
            prefill_tokens += entry.num_scheduled
    preempted, finished, reset = _count_events(record.events)
    evictions, hits = _count_ops(record.block_ops)
    return _ROW.pack(
        record.step,
        record.kind,
        record.stop_reason,
        _ROW_FLAG_RESET if reset else 0,
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


def _count_events(events: list[Event]) -> tuple[int, int, bool]:
    preempted = finished = 0
    reset = False
    for event in events:
        if isinstance(event, Preempted):
            preempted += 1
        elif isinstance(event, Finished):
            finished += 1
        elif isinstance(event, Reset):
            reset = True
    return preempted, finished, reset


def _count_ops(block_ops: list[BlockOp]) -> tuple[int, int]:
    evictions = hits = 0
    for op in block_ops:
        if op.kind == BlockOpKind.EVICT:
            evictions += 1
        elif op.kind == BlockOpKind.HIT:
            hits += 1
    return evictions, hits


def make_steps(rows: bytes, first_step: int, t_ms: float) -> Frame:
    """Wrap consecutive step rows, the first of them that of `first_step`."""
    count = len(rows) // ROW_BYTES
    return Frame(FrameKind.STEPS, rows, first_step, count, count, t_ms)


def make_gap(first_step: int, n_steps: int) -> Frame:
    """Say that the rows of these steps are lost for this client."""
    return Frame(FrameKind.GAP, first_step=first_step, n_steps=n_steps)


def make_batch(record: StepRecord) -> Frame:
    """Describe who ran in a step."""
    payload = b"".join(
        _ENTRY.pack(entry.slot & NO_SLOT, entry.is_decode, 0, entry.num_scheduled, entry.seq_id & NO_ID)
        for entry in record.batch
    )
    return Frame(FrameKind.BATCH, payload, record.step, 1, len(record.batch), record.t_ns / _NS_PER_MS)


# ---------------------------------------------------------------- marks

_OP_MARKS = {
    int(BlockOpKind.ALLOCATE): MarkKind.ALLOCATE,
    int(BlockOpKind.LOOKAHEAD): MarkKind.ALLOCATE,
    int(BlockOpKind.HIT): MarkKind.HIT,
    int(BlockOpKind.EVICT): MarkKind.EVICT,
}


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
    slot, seq_id = -1, -1
    match event:
        case Admitted():
            kind, slot, seq_id = MarkKind.ADMIT, event.slot, event.seq_id
        case Preempted():
            kind, slot, seq_id = MarkKind.PREEMPT, event.slot, event.seq_id
        case Finished():
            kind = MarkKind.ABORT if event.reason == FinishReason.ABORT else MarkKind.FINISH
            slot, seq_id = event.slot, event.seq_id
        case Rejected():
            kind = MarkKind.REJECT
        case Reset():
            kind = MarkKind.RESET
        case _:  # an arrival is seen in the queue's length
            return b""
    return _MARK.pack(step, kind, 0, slot & NO_SLOT, NO_ID, seq_id & NO_ID)


def make_marks(marks: bytes, overflow: int, first_step: int, t_ms: float) -> Frame:
    """Wrap encoded marks, the oldest of them of `first_step`; `overflow` older ones did not fit."""
    count = len(marks) // MARK_BYTES
    return Frame(FrameKind.MARKS, marks, first_step, 0, count, t_ms, overflow)


def mark_step(mark: bytes) -> int:
    """Return the step of one encoded mark."""
    return int.from_bytes(mark[:4], "little")


# ---------------------------------------------------------------- hello and ack


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """Who the server is.

    `config` and `engine` are null until the model is loaded, `engine` also in older recordings.
    """

    session: str
    status: str
    model: str | None
    step: int
    config: EngineConfig | None
    engine: EngineInfo | None = None
    protocol: int = PROTOCOL
    states: tuple[str, ...] = tuple(state.name.lower() for state in BlockState)
    stop_reasons: tuple[str, ...] = tuple(reason.name.lower() for reason in StopReason)
    mark_kinds: dict[int, str] = msgspec.field(
        default_factory=lambda: {int(kind): kind.name.lower() for kind in MarkKind}
    )


def make_hello(hello: Hello, t_ms: float) -> Frame:
    """Wrap a HELLO; `t_ms` is the server's clock."""
    return Frame(FrameKind.HELLO, msgspec.json.encode(hello), hello.step, 0, 1, t_ms)


def parse_ack(data: Any) -> Ack:
    """Read a client's message; raises ValueError if it is not an ACK."""
    if not isinstance(data, bytes) or len(data) != ACK_BYTES:
        raise ValueError(f"an ACK has {ACK_BYTES} bytes")
    kind, fps, flags, step, painted = _ACK.unpack(data)
    if kind != FrameKind.ACK:
        raise ValueError(f"type {kind} is not an ACK")
    if not 1 <= fps <= MAX_FPS:
        raise ValueError(f"{fps} frames per second; allowed: 1 to {MAX_FPS}")
    return Ack(fps, bool(flags & 1), step, painted)


# ---------------------------------------------------------------- messages


class Deflater:
    """Deflates big keyframes, each once: pages that connect together take the same one."""

    def __init__(self) -> None:
        """Begin with nothing deflated."""
        self._turn = asyncio.Lock()
        self._newest: tuple[Frame, Frame] | None = None

    async def deflate(self, frame: Frame) -> Frame:
        """Return the frame as it is to be sent. The newest keyframe is told by identity."""
        if frame.kind != FrameKind.KEYFRAME or len(frame.payload) <= DEFLATE_OVER_BYTES:
            return frame
        async with self._turn:
            if self._newest is None or self._newest[0] is not frame:
                self._newest = (frame, await _deflate(frame))
            return self._newest[1]


async def encode_message(frames: Iterable[Frame], deflater: Deflater) -> bytes:
    """Join frames to one message, big keyframes deflated."""
    return b"".join([(await deflater.deflate(frame)).encode() for frame in frames])


async def _deflate(frame: Frame) -> Frame:
    """Deflate in slices, so that others get their turn."""
    deflater = zlib.compressobj(_DEFLATE_LEVEL, wbits=-zlib.MAX_WBITS)
    parts = []
    for start in range(0, len(frame.payload), _DEFLATE_SLICE_BYTES):
        parts.append(deflater.compress(frame.payload[start : start + _DEFLATE_SLICE_BYTES]))
        await asyncio.sleep(0)
    parts.append(deflater.flush())
    return frame._replace(payload=b"".join(parts), deflated=True)
