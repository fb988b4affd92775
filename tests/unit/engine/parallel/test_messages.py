"""Frames and packed steps."""

import os
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import EngineInvariantError
from engine.parallel.messages import pack_inputs, read_frame, unpack_inputs, write_frame
from engine.runner.batch import make_inputs
from engine.runner.warm_up import make_text
from engine.scheduling.output import ScheduledSequence

BLOCK_SIZE = 4

chunks = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20), st.booleans()), min_size=1, max_size=8)


@given(chunks)
def test_a_step_arrives_as_it_was_sent(spans: list[tuple[int, int, bool]]) -> None:
    scheduled = []
    for number, (start, count, is_last) in enumerate(spans):
        length = start + count + (not is_last)
        table = [100 * number + block for block in range(-(-length // BLOCK_SIZE))]
        scheduled.append(ScheduledSequence(make_text(list(range(length)), table), start, count))
    sent = make_inputs(scheduled, BLOCK_SIZE)
    got = unpack_inputs(bytearray(pack_inputs(sent)))
    assert (got.num_decodes, got.block_size) == (sent.num_decodes, sent.block_size)
    for name in (
        *("input_ids", "positions", "slot_mapping", "query_starts", "context_lens"),
        *("block_tables", "logits_rows"),
    ):
        expected, array = getattr(sent, name), getattr(got, name)
        assert (array.dtype, array.shape) == (np.dtype(np.int32), expected.shape)
        assert np.array_equal(array, expected)
        assert array.flags.writeable, "torch warns of tensors that it must not write"


def test_a_step_with_other_sizes_than_it_names_is_refused() -> None:
    frame = bytearray(pack_inputs(make_inputs([ScheduledSequence(make_text([1], [0]), 0, 1)], BLOCK_SIZE)))
    with pytest.raises(EngineInvariantError, match="does not have the sizes it names"):
        unpack_inputs(frame[:-4])


def test_frames_larger_than_a_pipe_arrive_whole_and_in_order() -> None:
    reader, writer = os.pipe()
    frames: list[bytes | bytearray | None] = [b"", bytes(range(256)) * 4096, b"end"]

    def write() -> None:
        for frame in frames:
            write_frame(writer, bytes(frame or b""))
        os.close(writer)

    thread = threading.Thread(target=write)
    thread.start()
    assert [read_frame(reader) for _ in frames] == frames
    assert read_frame(reader) is None, "the other side has closed"
    thread.join()
    os.close(reader)


@pytest.mark.parametrize("part", [b"\x05", b"\x05\x00\x00\x00", b"\x05\x00\x00\x00four"])
def test_a_frame_that_is_cut_off_is_none(part: bytes) -> None:
    reader, writer = os.pipe()
    os.write(writer, part)
    os.close(writer)
    assert read_frame(reader) is None
    os.close(reader)


def test_writing_to_nobody_is_an_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with pytest.raises(BrokenPipeError):
        write_frame(writer, b"x")
    os.close(writer)
