"""The frames of recorded steps are those of the live view, one message a step."""

from pathlib import Path

from app.realtime.frames import FrameKind
from app.realtime.journal import Journal
from app.services.sessions import SessionReader
from tests.support.recording import Recording, make_run, recording
from tests.support.wire import Picture, packed_cells, read_frames, split_messages


def check_messages(messages: list[bytes], it: Recording, steps: range) -> None:
    """Message 0 shows the state before `steps`, each other one the next step."""
    picture = Picture()
    for step, message in zip((steps.start - 1, *steps), messages, strict=True):
        picture.apply(message)
        assert picture.step == step
        assert picture.cells == packed_cells(it.states[step]["blocks"]), f"step {step}"
        batch = it.states[step]["batch"]
        if batch is not None:
            assert picture.batch is not None
            assert picture.batch["step"] == batch["step"]
    assert picture.rows == list(steps)
    assert picture.gaps == []


async def test_chunks_show_each_step_as_the_live_view_did(tmp_path: Path) -> None:
    config, records = make_run(1, 700, 0.01)
    async with recording(tmp_path, config) as it:
        await it.feed(records)
        for first in (513, 1, 257):
            frames = await it.reader.chunk_frames("s1", first)
            messages = split_messages(frames.data)
            check_messages(messages, it, range(first, min(first + 256, 701)))
            hello, keyframe, *others = read_frames(messages[0])
            assert (hello["kind"], keyframe["kind"]) == (FrameKind.HELLO, FrameKind.KEYFRAME)
            assert {frame["kind"] for frame in others} <= {FrameKind.BATCH}
            assert (hello["first_step"], keyframe["first_step"]) == (first - 1, first - 1)
            assert frames.is_whole == (first != 513)
        picture = Picture()
        picture.apply(messages[0])
        assert picture.hello is not None
        assert (picture.hello["status"], picture.hello["session"]) == ("recorded", "s1")


async def test_each_message_is_byte_for_byte_what_a_client_of_the_live_view_gets(tmp_path: Path) -> None:
    config, records = make_run(2, 256)
    journal = Journal(config)
    cursor = journal.start(0)
    live = [b"".join(frame.encode() for frame in journal.take(cursor))]
    for record in records:
        journal.fold(record)
        live.append(b"".join(frame.encode() for frame in journal.take(cursor)))
    async with recording(tmp_path, config) as it:
        await it.feed(records)
        messages = split_messages((await it.reader.chunk_frames("s1", 1)).data)
    assert messages[1:] == live[1:]
    hello = read_frames(messages[0])[0]
    assert messages[0].endswith(live[0])
    assert hello["kind"] == FrameKind.HELLO


async def test_the_newest_chunk_of_a_running_session_grows(tmp_path: Path) -> None:
    config, records = make_run(1, 700, 0.01)
    async with recording(tmp_path, config) as it:
        await it.feed(records[:256])
        empty = await it.reader.chunk_frames("s1", 257)
        check_messages(split_messages(empty.data), it, range(257, 257))
        assert not empty.is_whole
        await it.feed(records[256:260])
        check_messages(split_messages((await it.reader.chunk_frames("s1", 257)).data), it, range(257, 261))


async def test_all_chunks_of_an_ended_session_are_whole(tmp_path: Path) -> None:
    config, records = make_run(1, 700, 0.01)
    async with recording(tmp_path, config) as it:
        await it.feed(records[:300])
        it.recorder.close()
        await it.settle()
        assert (await SessionReader(it.database).chunk_frames("s1", 257)).is_whole
