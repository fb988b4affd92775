"""What the journal gives a client, and at what cost."""

import asyncio
import struct
import zlib
from array import array
from contextlib import ExitStack

import pytest

from app.realtime import frames, journal
from app.realtime import journal as journal_module
from app.realtime.frames import (
    DEFLATE_OVER_BYTES,
    Deflater,
    Frame,
    FrameKind,
    HostCounts,
    encode_message,
    make_keyframe,
)
from app.realtime.hub import EventHub, Resume
from app.realtime.journal import Cursor, Journal
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.records import RecordKind, Reset, StepRecord
from engine.views import BlockView
from tests.builders import make_core, make_request, random_run, state_from_books
from tests.support.wire import Picture, packed_cells

BIG = EngineConfig(num_blocks=100_000)


def make_reset(step: int, num_blocks: int) -> StepRecord:
    return StepRecord(
        step=step,
        kind=RecordKind.CONTROL,
        t_ns=step,
        schedule_ns=0,
        forward_ns=0,
        sample_ns=0,
        host_ns=0,
        batch=[],
        block_ops=[],
        events=[Reset("boom")],
        stop_reason=0,
        prefix_pending=[],
        token_budget=1,
        num_running=0,
        num_waiting=0,
        num_free=num_blocks,
        num_cached=0,
        num_used=0,
    )


def make_busy_journal(num_steps: int) -> tuple[EngineCore, Journal]:
    """Run two requests of 50 tokens for so many steps."""
    core = make_core(num_blocks=64, max_model_len=128)
    for index in range(2):
        core.add_request(make_request(f"r{index}", prompt=9, max_tokens=50))
    log = Journal(core.config)
    for _ in range(num_steps):
        log.fold(core.step().record)
    return core, log


def take(log: Journal, after: int | None) -> Picture:
    picture = Picture()
    picture.apply(b"".join(frame.encode() for frame in log.take(log.start(after))))
    return picture


# ---------------------------------------------------------------- cells


def test_a_reset_of_a_big_pool_packs_no_block_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    num_packed = 0

    def count(view: BlockView) -> int:
        nonlocal num_packed
        num_packed += 1
        return frames.pack_cell(view)

    log = Journal(BIG)
    monkeypatch.setattr(journal, "pack_cell", count)
    log.fold(make_reset(1, BIG.num_blocks))
    picture = take(log, None)
    assert num_packed == 0
    assert picture.cells == [frames.BLANK_CELL] * BIG.num_blocks


@pytest.mark.parametrize("seed", range(6))
def test_the_picture_is_right_after_every_reset_and_every_idle_spell(seed: int) -> None:
    log: Journal | None = None
    num_blank = 0
    for core, result in random_run(seed, 300, fail_rate=0.05, enable_prefix_caching=seed % 2 == 0):
        log = log or Journal(core.config)
        log.fold(result.record)
        picture = take(log, None)
        assert picture.cells == packed_cells(state_from_books(core)["blocks"])
        num_blank += result.record.num_free == core.config.num_blocks
    assert num_blank > 0


# ---------------------------------------------------------------- keyframes


def test_clients_of_one_step_take_the_same_keyframe() -> None:
    core, log = make_busy_journal(5)
    first, second = (log.take(log.start(None))[0] for _ in range(2))
    assert first is second
    log.fold(core.step().record)
    third = log.take(log.start(None))[0]
    assert third is not first
    assert (first.first_step, third.first_step) == (5, 6)


def test_clients_that_are_equally_far_take_the_same_frames_and_stay_so() -> None:
    core, log = make_busy_journal(5)
    first, second, slow = log.start(None), log.start(None), log.start(None)
    assert log.take(first) is log.take(second)
    picture = Picture()
    for number in range(21):
        log.fold(core.step().record)
        taken = log.take(first)
        assert log.take(second) is taken
        assert first == second
        if number % 3 == 2:
            missed = log.take(slow)
            assert missed != taken
            picture.apply(b"".join(frame.encode() for frame in missed))
            assert picture.cells == packed_cells(state_from_books(core)["blocks"])
            assert slow == first
    assert log.take(slow) is log.take(first)


def test_a_record_that_cannot_be_encoded_is_never_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    core, log = make_busy_journal(5)
    cursor = log.start(None)
    log.take(cursor)
    for _ in range(3):
        log.fold(core.step().record)

    def fail(_record: object) -> bytes:
        raise OverflowError

    with monkeypatch.context() as broken:
        broken.setattr(journal_module, "encode_marks", fail)
        for _ in range(2):
            with pytest.raises(OverflowError):
                log.take(cursor)
    rows = [frame for frame in log.take(cursor) if frame.kind == FrameKind.STEPS]
    assert [(frame.first_step, frame.n_steps) for frame in rows] == [(6, 3)]


async def test_pages_that_connect_together_have_one_keyframe_deflated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_deflated = 0
    make_deflater = zlib.compressobj

    def count(level: int, *, wbits: int) -> object:
        nonlocal num_deflated
        num_deflated += 1
        return make_deflater(level, wbits=wbits)

    monkeypatch.setattr(zlib, "compressobj", count)
    hub = EventHub("s1")
    hub.open(BIG, "fake")
    hub.publish([make_reset(1, BIG.num_blocks)])
    with ExitStack() as stack:
        subscriptions = [stack.enter_context(hub.subscribe(Resume())) for _ in range(16)]
        messages = await asyncio.gather(*(each.next_message() for each in subscriptions))
        assert num_deflated == 1
        hub.publish([make_reset(2, BIG.num_blocks)])
        messages += await asyncio.gather(*(each.next_message() for each in subscriptions))
    assert num_deflated == 2
    for message in messages:
        picture = Picture()
        picture.apply(message)
        assert picture.cells == [frames.BLANK_CELL] * BIG.num_blocks


async def test_a_client_that_leaves_while_it_has_a_keyframe_deflated_harms_no_other() -> None:
    frame = make_keyframe(array("I", range(500_000)), 1, 0.0)
    deflater = Deflater()
    leaving = asyncio.create_task(encode_message([frame], deflater))
    staying = asyncio.create_task(encode_message([frame], deflater))
    for _ in range(3):
        await asyncio.sleep(0)
    leaving.cancel()
    message = await asyncio.wait_for(staying, 20)
    assert leaving.cancelled()
    picture = Picture()
    picture.apply(message)
    assert picture.cells == list(range(500_000))


async def test_small_keyframes_and_other_frames_are_left_alone() -> None:
    deflater = Deflater()
    small = Frame(frames.FrameKind.KEYFRAME, bytes(DEFLATE_OVER_BYTES))
    rows = Frame(frames.FrameKind.STEPS, bytes(2 * DEFLATE_OVER_BYTES))
    assert await deflater.deflate(small) is small
    assert await deflater.deflate(rows) is rows


# ---------------------------------------------------------------- marks


def marks_after(log: Journal, step: int) -> int:
    return sum(mark[0] > step for mark in take(log, 0).marks)


def test_a_fresh_page_gets_the_marks_that_fit_and_has_lost_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MAX_MARKS_A_MESSAGE", 5)
    _, log = make_busy_journal(30)
    for after in (None, 999):
        fresh = take(log, after)
        assert (len(fresh.marks), fresh.marks_lost) == (5, 0)


def test_a_fresh_page_has_lost_no_marks_of_before_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "KEPT_MARKS", 4)
    _, log = make_busy_journal(30)
    fresh = take(log, None)
    assert (len(fresh.marks), fresh.marks_lost) == (4, 0)


@pytest.mark.parametrize("after", [0, 1, 7, 29, 30])
def test_a_page_that_comes_back_is_told_how_many_marks_it_has_lost(
    monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    _, whole = make_busy_journal(30)
    due = marks_after(whole, after)
    monkeypatch.setattr(journal, "KEPT_MARKS", 4)
    _, log = make_busy_journal(30)
    back = take(log, after)
    assert len(back.marks) + back.marks_lost == due
    assert len(back.marks) == min(4, due)


def test_marks_of_steps_whose_rows_are_gone_are_told_by_the_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "KEPT_ROWS", 10)
    _, log = make_busy_journal(30)
    back = take(log, 3)
    assert back.gaps == [(4, 17)]
    assert back.marks_lost == 0
    assert back.marks
    assert all(mark[0] > 20 for mark in back.marks)


def test_the_host_tier_is_told_when_it_has_changed_and_only_then() -> None:
    log: Journal | None = None
    cursors: dict[str, Cursor] = {}
    told: list[HostCounts] = []
    for number, (core, result) in enumerate(
        random_run(3, 300, num_host_blocks=40, load_steps=3, policy="priority")
    ):
        log = log or Journal(core.config)
        log.fold(result.record)
        cursors = cursors or {"prompt": log.start(0), "slow": log.start(0)}
        counts = [host_counts(frame) for frame in log.take(cursors["prompt"]) if frame.kind == FrameKind.HOST]
        assert len(counts) == (not told or told[-1] != true_counts(core))
        told += counts
        assert told[-1] == true_counts(core)
        if number % 50 == 49:
            slow = [host_counts(frame) for frame in log.take(cursors["slow"]) if frame.kind == FrameKind.HOST]
            assert slow in ([], [true_counts(core)])
    assert len(told) > 20
    assert max(counts.num_loading for counts in told) > 0


def test_without_a_host_tier_there_is_no_frame_of_it() -> None:
    _, log = make_busy_journal(5)
    assert FrameKind.HOST not in {frame.kind for frame in log.take(log.start(None))}


def host_counts(frame: Frame) -> HostCounts:
    return HostCounts(*struct.unpack("<4I", frame.payload))


def true_counts(core: EngineCore) -> HostCounts:
    kv = core.scheduler.state.kv
    num_loading = sum(sequence.load_id != 0 for sequence in core.scheduler.state.running)
    return HostCounts(kv.host.num_blocks, kv.host.num_used, kv.host.num_pinned, num_loading)
