"""Steps that could not be kept leave a gap with both ends known; everything else stays readable and right."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import delete, insert

from app.db import writer as writer_module
from app.db.models import ChunkRow, KeyframeRow, RequestEventRow
from app.errors import NotInHistoryError
from app.history import step_log
from app.history.record_codec import encode_state
from app.realtime.frames import FrameKind
from app.services.session_edits import SessionEditor
from engine.records import StepRecord
from engine.snapshot_data import SnapshotState
from tests.support.api import until
from tests.support.history import fetch
from tests.support.recording import Recording, make_run, recording
from tests.support.wire import Picture, packed_cells, read_frames, split_messages


@contextmanager
def full_queue(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(writer_module, "MAX_QUEUED_PUTS", 0)
        yield


def take_together(it: Recording, records: Iterable[StepRecord]) -> None:
    """Record these as one row, or lose them together."""
    for record in records:
        it.take(record)
    it.log.flush()


async def check_gap(it: Recording, first: int, last: int) -> None:
    """Steps `first` to `last` are lost: the state after the last of them is known, others are refused."""
    info = await it.reader.facts("s1")
    assert [(gap.first_step, gap.last_step) for gap in await it.reader.gaps(info)] == [(first, last)]
    assert info.num_lost_steps == last - first + 1
    for step in (first - 1, last, last + 1, info.last_step):
        assert await it.state_at(step) == it.states[step], f"step {step}"
    for step in {first, (first + last) // 2} - {last}:
        with pytest.raises(NotInHistoryError, match=f"steps {first} to {last} were lost"):
            await it.state_at(step)
    for step in {first, (first + last) // 2, last}:
        with pytest.raises(NotInHistoryError, match=f"Step {step} is not recorded: steps {first} to {last} "):
            await it.reader.decisions("s1", step)
    assert (await it.reader.decisions("s1", last + 1)).step == last + 1


async def test_a_full_queue_leaves_a_gap_that_ends_with_a_known_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, records = make_run(1, 700, 0.01)
    async with recording(tmp_path, config) as it:
        await it.feed(records[:100])
        with full_queue(monkeypatch):
            await it.feed(records[100:120])
            await it.feed(records[120:140])
        await it.feed(records[140:600])
        await check_gap(it, 101, 140)
        assert it.writer.status.num_lost_steps == 40
        await it.execute(delete(KeyframeRow).where(KeyframeRow.is_base.is_(False)))
        await check_gap(it, 101, 140)
        found = await it.reader.records("s1", 1, 600)
        assert [record.step for record in found] == [*range(1, 101), *range(141, 601)]


async def test_frames_say_what_is_missing_and_go_on_with_the_whole_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, records = make_run(1, 700, 0.01)
    async with recording(tmp_path, config) as it:
        await it.feed(records[:100])
        with full_queue(monkeypatch):
            await it.feed(records[100:140])
        await it.feed(records[140:600])
        messages = split_messages((await it.reader.chunk_frames("s1", 1)).data)
        steps = [*range(101), 140, *range(141, 257)]
        picture = Picture()
        for step, message in zip(steps, messages, strict=True):
            picture.apply(message)
            assert picture.step == step
            assert picture.cells == packed_cells(it.states[step]["blocks"])
        assert picture.gaps == [(101, 40)]
        kinds = [frame["kind"] for frame in read_frames(messages[101])]
        assert kinds[:2] == [FrameKind.KEYFRAME, FrameKind.GAP]


async def test_a_gap_over_the_edge_of_a_chunk_is_told_where_the_steps_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, records = make_run(1, 700, 0.01)
    async with recording(tmp_path, config) as it:
        await it.feed(records[:200])
        with full_queue(monkeypatch):
            await it.feed(records[200:300])
        await it.feed(records[300:600])
        await check_gap(it, 201, 300)
        before = Picture()
        for message in split_messages((await it.reader.chunk_frames("s1", 1)).data):
            before.apply(message)
        assert (before.step, before.gaps) == (200, [])
        after = Picture()
        messages = split_messages((await it.reader.chunk_frames("s1", 257)).data)
        after.apply(messages[0])
        assert (after.step, after.gaps) == (300, [(201, 100)])
        assert after.cells == packed_cells(it.states[300]["blocks"])
        for message in messages[1:]:
            after.apply(message)
        assert after.rows == list(range(301, 513))


async def test_a_chunk_that_is_lost_as_a_whole_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, records = make_run(1, 700, 0.01)
    async with recording(tmp_path, config) as it:
        await it.feed(records[:200])
        with full_queue(monkeypatch):
            await it.feed(records[200:600])
        await it.feed(records[600:])
        with pytest.raises(NotInHistoryError, match="steps 201 to 600 were lost"):
            await it.reader.chunk_frames("s1", 257)


async def test_rows_refused_later_end_in_a_gap_too(tmp_path: Path) -> None:
    config, records = make_run(1, 700, 0.01)
    async with recording(tmp_path, config) as it:
        await it.feed(records[:100])
        # A row that is in the way of the next one.
        in_the_way = {"session_id": "s1", "first_step": 101, "num_steps": 1, "first_ns": 0, "last_ns": 0}
        await it.execute(insert(ChunkRow).values(**in_the_way, records=b""))
        await it.feed(records[100:130])
        await it.feed(records[130:])
        await check_gap(it, 101, 130)
        assert [record.step for record in await it.reader.records("s1", 100, 700)] == [
            100,
            *range(131, 701),
        ]


async def test_a_session_that_ends_in_a_gap_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, records = make_run(1, 700, 0.01)
    async with recording(tmp_path, config) as it:
        await it.feed(records[:100])
        with full_queue(monkeypatch):
            await it.feed(records[100:120])
        it.recorder.close()
        await it.settle()
        info = await it.reader.facts("s1")
        assert (info.status, info.last_step, info.num_lost_steps) == ("stopped", 120, 20)
        assert await it.state_at(120) == it.states[120]


async def test_nothing_is_tried_when_recording_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, records = make_run(1, 700, 0.01)
    async with recording(tmp_path, config) as it:
        await it.feed(records[:100])
        await it.writer._give_up("gone")
        await it.feed(records[100:300])
        assert it.writer.status.num_lost_steps == 200


async def test_what_happened_in_a_gap_is_no_marker_and_takes_no_bookmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, records = make_run(1, 700, 0.01)
    async with recording(tmp_path, config) as it:
        await it.feed(records[:250])
        with full_queue(monkeypatch):
            await it.feed(records[250:300])
        await it.feed(records[300:])
        event = {"session_id": "s1", "request_id": "r", "choice_index": 0, "seq_id": 1, "t_ns": 1}
        event |= {"kind": "finished", "detail": "{}"}
        rows = [event | {"seq": step, "step": step} for step in range(1, 701)]
        await it.execute(insert(RequestEventRow).values(rows))
        markers, is_truncated = await it.reader.markers("s1")
        editor = SessionEditor(it.reader, it.database, it.writer, "another")
        for step in (251, 299):
            with pytest.raises(NotInHistoryError, match=f"Step {step} is not recorded: steps 251 to 300"):
                await editor.add_bookmark("s1", step, "")
        for step in (0, 250, 300, 700):
            await editor.add_bookmark("s1", step, "")

    assert not is_truncated
    assert [marker.step for marker in markers if marker.kind == "gap"] == [251]
    shown = [marker.step for marker in markers if marker.kind == "finish"]
    assert shown == [*range(1, 251), *range(300, 701)]


class HeldEncoder:
    """Takes the place of `encode_state`, which it lets go on when `gate` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        self.threads: list[str] = []
        self._encode = encode_state
        monkeypatch.setattr(step_log, "encode_state", self)

    def __call__(self, state: SnapshotState) -> bytes:
        self.threads.append(threading.current_thread().name)
        assert self.gate.wait(10)
        return self._encode(state)


async def test_the_end_of_a_gap_is_encoded_beside_the_loop_and_steps_meanwhile_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, records = make_run(1, 700, 0.01)
    async with recording(tmp_path, config) as it:
        await it.feed(records[:200])
        encoder = HeldEncoder(monkeypatch)
        with full_queue(monkeypatch):
            for record in records[200:240]:
                it.take(record)
            it.log.flush()
        it.log.flush()
        await until(lambda: len(encoder.threads) == 1)
        for record in records[240:600]:
            it.take(record)
        it.log.flush()
        assert len(encoder.threads) == 1
        encoder.gate.set()
        await it.settle()
        await it.feed(records[600:])
        assert "MainThread" not in encoder.threads
        await check_gap(it, 201, 240)
        for step in (241, 256, 257, 400, 512, 513, 600, 601):
            assert await it.state_at(step) == it.states[step], f"step {step}"
        frames = await it.reader.chunk_frames("s1", 257)
        assert len(split_messages(frames.data)) == 257
        rows = fetch(it.database.path, "SELECT first_step, num_steps FROM chunks ORDER BY 1")

    assert all((first - 1) // 256 == (first + count - 2) // 256 for first, count in rows)
    assert sum(count for _, count in rows) == 660


async def test_what_is_lost_while_the_end_of_a_gap_is_encoded_makes_the_gap_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_log, "RETRY_S", 0.01)
    config, records = make_run(1, 700, 0.01)
    async with recording(tmp_path, config) as it:
        await it.feed(records[:100])
        encoder = HeldEncoder(monkeypatch)
        with full_queue(monkeypatch):
            take_together(it, records[100:120])
            it.log.flush()
            await until(lambda: len(encoder.threads) == 1)
            for record in records[120:150]:
                it.take(record)
            it.log._on_lost(step_log._Loss(121, 20))
        encoder.gate.set()
        await until(lambda: len(encoder.threads) == 2 and not it.log._tasks)
        await it.feed(records[150:300])
        await check_gap(it, 101, 150)


async def test_reading_does_not_hurry_the_end_of_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_log, "RETRY_S", 3600.0)
    config, records = make_run(1, 700, 0.01)
    async with recording(tmp_path, config) as it:
        await it.feed(records[:100])
        with full_queue(monkeypatch):
            take_together(it, records[100:120])
            num_lost = it.writer.status.num_lost_writes
            for _ in range(20):
                assert (await it.reader.facts("s1")).last_step == 100
            assert it.writer.status.num_lost_writes == num_lost
            assert not it.log._tasks


async def test_a_gap_ends_in_the_file_though_no_more_steps_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_log, "RETRY_S", 0.01)
    config, records = make_run(1, 700, 0.01)
    async with recording(tmp_path, config) as it:
        await it.feed(records[:100])
        with full_queue(monkeypatch):
            take_together(it, records[100:120])
        await until(lambda: it.log._base is None)
        await it.writer.settle()
        assert await it.state_at(120) == it.states[120]
