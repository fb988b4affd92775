import asyncio
import json
import struct
import zlib
from array import array
from typing import Any

import pytest

from app.realtime.frames import (
    DEFLATE_OVER_BYTES,
    Deflater,
    Frame,
    FrameKind,
    Hello,
    HostCounts,
    encode_message,
    make_batch,
    make_delta,
    make_gap,
    make_hello,
    make_host,
    make_keyframe,
    make_marks,
    make_steps,
    pack_cell,
    parse_ack,
)
from app.realtime.step_rows import encode_marks, encode_row
from engine.records import (
    Admitted,
    Arrived,
    BatchEntry,
    BlockOp,
    BlockOpKind,
    Finished,
    FreeCause,
    Loaded,
    Policies,
    Preempted,
    RecordKind,
    Rejected,
    Reset,
    Stalled,
    StopReason,
)
from engine.views import BlockState, BlockView
from tests.builders import make_config
from tests.support.step_records import T_NS, make_record
from tests.support.wire import make_ack

T_MS = 1.7e12


def hex_of(frame: Frame) -> str:
    return frame.encode().hex(" ", 4)


@pytest.mark.parametrize(
    ("view", "cell"),
    [
        (BlockView(BlockState.FREE, 0, -1, -1, 0, 0), 0xFFFF_00_00),
        (BlockView(BlockState.CACHED, 0, 5, -1, 16, 99), 0x0005_00_11),
        (BlockView(BlockState.ACTIVE, 1, 2, 40, 16, 99), 0x0002_01_12),
        (BlockView(BlockState.TAIL, 1, 3, 41, 9, 0), 0x0003_09_03),
        (BlockView(BlockState.TAIL, 1, 4095, 41, 255, 0), 0x0FFF_FF_03),
        (BlockView(BlockState.SHARED, 2, 0, 1, 16, 99), 0x0000_02_14),
        (BlockView(BlockState.SHARED, 300, 1, 1, 16, 99), 0x0001_FF_14),
        (BlockView(BlockState.RESERVED, 1, 3, 41, 0, 0), 0x0003_01_05),
    ],
)
def test_cell_holds_state_hash_aux_and_slot(view: BlockView, cell: int) -> None:
    assert pack_cell(view) == cell


def test_keyframe_bytes() -> None:
    frame = make_keyframe(array("I", [0xFFFF0000, 0x00030903, 1]), 7, T_MS)
    assert hex_of(frame) == (
        "02000100 0c000000 07000000 01000000 03000000 00000000 00008056 febc7842 "
        "0000ffff 03090300 01000000 00000000"
    )


def test_delta_bytes() -> None:
    frame = make_delta([0, 2], array("I", [10, 11, 12]), 7, T_MS)
    assert hex_of(frame) == (
        "03000100 10000000 07000000 01000000 02000000 00000000 00008056 febc7842 "
        "00000000 0a000000 02000000 0c000000"
    )


def test_a_delta_of_nothing_still_moves_the_step() -> None:
    assert hex_of(make_delta([], array("I", [1]), 9, 0.0)) == (
        "03000100 00000000 09000000 01000000 00000000 00000000 00000000 00000000"
    )


def test_step_row_bytes() -> None:
    record = make_record(
        kind=RecordKind.CONTROL,
        stop_reason=StopReason.WATERMARK,
        batch=[
            BatchEntry(1, 0, 0, 10),
            BatchEntry(2, 1, 0, 3, 99),
            BatchEntry(3, 2, 8, 1, 5),
            BatchEntry(4, 3, 8, 1, -1),
        ],
        block_ops=[
            BlockOp(BlockOpKind.EVICT, 1, 0),
            BlockOp(BlockOpKind.HIT, 2, 0),
            BlockOp(BlockOpKind.HIT, 3, 0),
            BlockOp(BlockOpKind.ALLOCATE, 4, 0),
        ],
        events=[
            Preempted(9, 3, "newest-first", "recompute", 5, 2, 1, []),
            Finished(8, 2, "stop", 3),
            Finished(7, -1, "abort", 0),
            Reset("boom"),
        ],
        num_running=3,
        num_waiting=70_000,
        num_free=1,
        num_cached=2,
    )
    expected = struct.pack(
        "<IBBHd4f2I4H2I4H",
        *(7, 1, 4, 1, T_MS, 1.0, 2.0, 0.5, 0.25, 14, 1, 3, 1, 3, 65_535, 1, 2, 1, 2, 1, 2),
    )
    assert encode_row(record) == expected
    assert len(expected) == 64
    header = "04000100 40000000 07000000 01000000 01000000 00000000 00008056 febc7842"
    assert make_steps(expected, 7, T_MS).encode() == bytes.fromhex(header) + expected


def test_batch_bytes() -> None:
    record = make_record(batch=[BatchEntry(300, 1, 0, 10), BatchEntry(2, 0, 8, 1, 5)])
    assert hex_of(make_batch(record)) == (
        "05000100 18000000 07000000 01000000 02000000 00000000 00008056 febc7842 "
        "01000000 0a000000 2c010000 00000100 01000000 02000000"
    )


def test_each_mark_has_its_bytes() -> None:
    record = make_record(
        block_ops=[
            BlockOp(BlockOpKind.ALLOCATE, 4, 1),
            BlockOp(BlockOpKind.LOOKAHEAD, 5, 1),
            BlockOp(BlockOpKind.HIT, 2, 1),
            BlockOp(BlockOpKind.EVICT, 1, -1),
            BlockOp(BlockOpKind.FREE, 6, 1, FreeCause.PREEMPTED),
            BlockOp(BlockOpKind.FREE, 7, 1, FreeCause.FINISHED),
            BlockOp(BlockOpKind.STORE, 8, 1, 2**64 - 1),
            BlockOp(BlockOpKind.SWAP_OUT, 9, 1, 30),
            BlockOp(BlockOpKind.SWAP_IN, 10, 1, 31),
        ],
        events=[
            Preempted(9, 3, "newest-first", "recompute", 5, 2, 1, []),
            Preempted(10, 4, "newest-first", "swap", 1, 2, 1, [], num_tokens_kept=4),
            Finished(8, 2, "stop", 3),
            Finished(7, -1, "abort", 0),
            Rejected("r", 0, 5, "context_length_exceeded"),
            Reset("boom"),
            Admitted(6, 0, 5, 0, resumed=False),
            Arrived(6, "r6", 0, 5, 5, T_NS),
            Loaded(5, 2, 8, 2, 3, waited=True),
            Loaded(4, 1, 8, 2, 3, waited=False),
            Policies("fcfs", "oldest-first", "swap"),
            Stalled(3, 0, 1, 2),
        ],
    )
    none = 0xFFFFFFFF
    assert list(struct.iter_unpack("<IBBHII", encode_marks(record))) == [
        (7, 1, 0, 1, 4, none),
        (7, 13, 0, 1, 5, none),
        (7, 2, 0, 1, 2, none),
        (7, 3, 0, 0xFFFF, 1, none),
        (7, 4, 0, 1, 6, none),
        (7, 11, 0, 1, 9, none),
        (7, 12, 0, 1, 10, none),
        (7, 5, 0, 3, none, 9),
        (7, 5, 1, 4, none, 10),
        (7, 6, 0, 2, none, 8),
        (7, 7, 0, 0xFFFF, none, 7),
        (7, 8, 0, 0xFFFF, none, none),
        (7, 9, 0, 0xFFFF, none, none),
        (7, 10, 0, 0, none, 6),
        (7, 14, 1, 2, none, 5),
        (7, 14, 0, 1, none, 4),
        (7, 15, 0, 0xFFFF, none, none),
        (7, 16, 0, 0xFFFF, none, 3),
    ]


@pytest.mark.parametrize(
    ("flags", "overrides"),
    [
        (1, {"events": [Reset("boom")]}),
        (2, {"events": [Policies("fcfs", "oldest-first", "auto")]}),
        (4, {"events": [Stalled(3, 0, 1, 2)]}),
        (8, {"events": [Loaded(5, 2, 8, 2, 3, waited=True)]}),
        (0, {"events": [Loaded(5, 2, 8, 2, 3, waited=False)]}),
        (16, {"block_ops": [BlockOp(BlockOpKind.SWAP_OUT, 9, 1, 30)]}),
        (32, {"block_ops": [BlockOp(BlockOpKind.SWAP_IN, 9, 1, 30)]}),
        (0, {"events": [Preempted(9, 3, "newest-first", "recompute", 5, 2, 1, [])]}),
        (2 << 8, {"events": [Preempted(9, 3, "newest-first", "swap", 1, 2, 1, [], 4)] * 2}),
        (255 << 8, {"events": [Preempted(9, 3, "newest-first", "swap", 1, 2, 1, [], 4)] * 300}),
    ],
)
def test_the_flags_of_a_row_say_what_its_counts_do_not(flags: int, overrides: dict[str, Any]) -> None:
    assert int.from_bytes(encode_row(make_record(**overrides))[6:8], "little") == flags


def test_host_bytes() -> None:
    assert hex_of(make_host(HostCounts(40, 12, 5, 1), 7, T_MS)) == (
        "09000100 10000000 07000000 01000000 01000000 00000000 00008056 febc7842 "
        "28000000 0c000000 05000000 01000000"
    )


def test_marks_bytes_tell_how_many_did_not_fit() -> None:
    frame = make_marks(encode_marks(make_record(events=[Finished(1, 2, "stop", 3)])), 5, 7, T_MS)
    assert hex_of(frame) == (
        "06000100 10000000 07000000 00000000 01000000 05000000 00008056 febc7842 "
        "07000000 06000200 ffffffff 01000000"
    )


def test_gap_bytes() -> None:
    assert (
        hex_of(make_gap(3, 100)) == "07000100 00000000 03000000 64000000 00000000 00000000 00000000 00000000"
    )


def test_hello_tells_the_names_behind_the_numbers() -> None:
    hello = Hello(session="s", status="ready", model="m", step=7, config=make_config())
    frame = make_hello(hello, T_MS)
    assert frame.encode()[:4].hex() == "01000100"
    body = json.loads(frame.payload)
    assert body["protocol"] == 1
    assert body["config"]["num_blocks"] == 8
    assert body["states"] == ["free", "cached", "active", "tail", "shared", "reserved", "offloaded"]
    assert body["stop_reasons"][4] == "watermark"
    assert body["mark_kinds"]["4"] == "freed_by_preemption"
    assert body["mark_kinds"]["12"] == "swap_in"
    assert (body["session"], body["status"], body["model"], body["step"]) == ("s", "ready", "m", 7)


def test_ack_is_read() -> None:
    assert parse_ack(make_ack(3, fps=30, hidden=True, step=9)) == (30, True, 9, 3)


@pytest.mark.parametrize(
    "data",
    [
        None,
        "08",
        b"",
        make_ack(1)[:-1],
        make_ack(1) + b"\0",
        b"\x07" + make_ack(1)[1:],
        make_ack(1, fps=0),
        make_ack(1, fps=61),
    ],
)
def test_anything_but_an_ack_is_refused(data: object) -> None:
    with pytest.raises(ValueError, match=r"ACK|frames per second"):
        parse_ack(data)


async def test_only_big_keyframes_are_deflated_and_others_get_their_turn() -> None:
    small = make_keyframe(array("I", range(DEFLATE_OVER_BYTES // 4)), 1, 0.0)
    assert await encode_message([small], Deflater()) == small.encode()
    cells = array("I", range(1_000_000))
    big = make_keyframe(cells, 1, 0.0)
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counter = asyncio.create_task(count_turns())
    message = await encode_message([small, big], Deflater())
    counter.cancel()
    assert turns >= 10
    kind, flags, _, size = struct.unpack_from("<BBHI", message, len(small.encode()))
    start = len(small.encode()) + 32
    assert (kind, flags) == (FrameKind.KEYFRAME, 1)
    assert zlib.decompress(message[start : start + size], -15) == cells.tobytes()
    assert len(message) % 8 == 0
