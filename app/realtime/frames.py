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
from engine.records import StepRecord, StopReason
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
_TAIL = BlockState.TAIL
_MAX_U8 = 0xFF
_NS_PER_MS = 1e6

_HEADER = struct.Struct("<BBHIIIIId")
_ENTRY = struct.Struct("<HBBII")
_HOST = struct.Struct("<4I")
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
    HOST = 9


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
    SWAP_OUT = 11
    SWAP_IN = 12
    LOOKAHEAD = 13
    LOADED = 14
    POLICIES = 15
    STALLED = 16


class HostCounts(NamedTuple):
    """The host tier: its blocks, those that hold something, and of these those that must not make room.

    `num_loading`: running sequences part of whose KV is on its way from there.
    """

    total: int
    used: int
    pinned: int
    num_loading: int


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


def make_host(counts: HostCounts, step: int, t_ms: float) -> Frame:
    """Describe the host tier as of `step`."""
    return Frame(FrameKind.HOST, _HOST.pack(*counts), step, 1, 1, t_ms)


# ---------------------------------------------------------------- marks


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
