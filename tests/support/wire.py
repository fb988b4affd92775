"""A second, plain reader of docs/wire.md for tests: shares no code with what it checks."""

import json
import struct
import zlib
from dataclasses import dataclass, field
from typing import Any

ROW_FIELDS = (
    "step",
    "kind",
    "stop_reason",
    "flags",
    "t_ms",
    "schedule_ms",
    "forward_ms",
    "sample_ms",
    "host_ms",
    "num_prefill_tokens",
    "num_decode_tokens",
    "num_prefill_seqs",
    "num_decode_seqs",
    "num_running",
    "num_waiting",
    "num_free",
    "num_cached",
    "preemptions",
    "finished",
    "evictions",
    "hit_blocks",
)
STATES = ("free", "cached", "active", "tail", "shared", "reserved", "offloaded")


def read_frames(message: bytes) -> list[dict[str, Any]]:
    """Return the frames of one message as dicts: header fields and `payload` (inflated)."""
    frames = []
    offset = 0
    while offset < len(message):
        kind, flags, version, size, first_step, n_steps, n_items, overflow, t_ms = struct.unpack_from(
            "<BBHIIIIId", message, offset
        )
        assert version == 1
        assert offset % 8 == 0
        payload = message[offset + 32 : offset + 32 + size]
        assert len(payload) == size
        padding = message[offset + 32 + size : offset + 32 + size + -size % 8]
        assert padding == bytes(-size % 8)
        frames.append(
            {
                "kind": kind,
                "flags": flags,
                "first_step": first_step,
                "n_steps": n_steps,
                "n_items": n_items,
                "overflow": overflow,
                "t_ms": t_ms,
                "payload": zlib.decompress(payload, -15) if flags & 1 else payload,
            }
        )
        offset += 32 + size + -size % 8
    return frames


def make_ack(painted: int, *, fps: int = 60, hidden: bool = False, step: int = 0) -> bytes:
    """Return the bytes of an ACK."""
    return struct.pack("<BBHII", 8, fps, int(hidden), step, painted)


@dataclass
class Picture:
    """What a client knows after the messages it was given."""

    hello: dict[str, Any] | None = None
    step: int = -1
    cells: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    last_row: dict[str, Any] | None = None
    gaps: list[tuple[int, int]] = field(default_factory=list)
    host: dict[str, int] | None = None
    batch: dict[str, Any] | None = None
    marks: list[tuple[int, ...]] = field(default_factory=list)
    marks_lost: int = 0
    num_keyframes: int = 0
    num_deltas: int = 0

    def apply(self, message: bytes) -> None:
        """Apply a whole message."""
        for frame in read_frames(message):
            self._take(frame)

    def _take(self, frame: dict[str, Any]) -> None:
        payload, count = frame["payload"], frame["n_items"]
        match frame["kind"]:
            case 1:
                self.hello = json.loads(payload)
            case 2:
                self.cells = list(struct.unpack(f"<{count}I", payload))
                self.step = frame["first_step"]
                self.num_keyframes += 1
            case 3:
                words = struct.unpack(f"<{2 * count}I", payload)
                assert len(set(words[0::2])) == count, "a block occurs once"
                for block_id, cell in zip(words[0::2], words[1::2], strict=True):
                    self.cells[block_id] = cell
                self.step = frame["first_step"]
                self.num_deltas += 1
            case 4:
                self._take_rows(frame)
            case 5:
                self.batch = {
                    "step": frame["first_step"],
                    "entries": list(struct.iter_unpack("<HBBII", payload)),
                }
                assert len(self.batch["entries"]) == count
            case 6:
                assert len(payload) == 16 * count
                self.marks += list(struct.iter_unpack("<IBBHII", payload))
                self.marks_lost += frame["overflow"]
            case 7:
                self.gaps.append((frame["first_step"], frame["n_steps"]))
            case 9:
                self.host = dict(
                    zip(("total", "used", "pinned", "loading"), struct.unpack("<4I", payload), strict=True)
                )
                assert count == 1
            case kind:
                raise AssertionError(f"unknown frame {kind}")

    def _take_rows(self, frame: dict[str, Any]) -> None:
        steps = [values[0] for values in struct.iter_unpack("<IBBHd4f2I4H2I4H", frame["payload"])]
        assert len(steps) == frame["n_items"] == frame["n_steps"]
        assert steps[0] == frame["first_step"]
        self.rows += steps
        values = struct.unpack("<IBBHd4f2I4H2I4H", frame["payload"][-64:])
        self.last_row = dict(zip(ROW_FIELDS, values, strict=True))


def packed_cells(blocks: list[dict[str, Any]]) -> list[int]:
    """Pack the blocks of a state document (`GET /api/engine/state`) as the wire does."""
    cells = []
    for block in blocks:
        aux = block["filled"] if block["state"] == "tail" else block["ref_cnt"]
        slot = 65535 if block["slot"] < 0 else block["slot"]
        hashed = block["hash"] is not None
        cells.append(STATES.index(block["state"]) | hashed << 4 | min(aux, 255) << 8 | slot << 16)
    return cells


def missing_rows(rows: list[int], gaps: list[tuple[int, int]]) -> list[int]:
    """Return the steps between the first and last row that came neither as a row nor in a gap."""
    told = set(rows)
    for first, count in gaps:
        told.update(range(first, first + count))
    return [step for step in range(rows[0], rows[-1] + 1) if step not in told]


def split_messages(data: bytes) -> list[bytes]:
    """Cut a recorded chunk where a message begins: at HELLO, KEYFRAME, DELTA; a HELLO keeps its KEYFRAME."""
    starts: list[int] = []
    offset = 0
    after_hello = False
    while offset < len(data):
        kind, size = data[offset], int.from_bytes(data[offset + 4 : offset + 8], "little")
        if kind in {1, 2, 3} and not after_hello:
            starts.append(offset)
        after_hello = kind == 1
        offset += 32 + size + -size % 8
    return [data[start:end] for start, end in zip(starts, [*starts[1:], len(data)], strict=True)]
