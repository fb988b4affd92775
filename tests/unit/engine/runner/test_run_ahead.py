"""What may be computed ahead, what of it is taken, and what the device's block tables are told."""

import numpy as np
import pytest
import torch

from engine.runner.device_tables import DeviceTables
from engine.runner.launcher import PendingTokens
from engine.runner.run_ahead import RunAhead, shares_ahead
from engine.runner.shares import make_launch
from engine.sampling_params import SamplingParams
from engine.scheduling.output import ScheduledSequence
from engine.sequence import EngineRequest, Sequence

BLOCK_SIZE = 4


class NoEvent:
    def wait(self) -> None:
        """Everything has happened."""


def make_sequence(num_tokens: int, blocks: list[int], max_tokens: int = 10, seq_id: int = 0) -> Sequence:
    request = EngineRequest(
        request_id="r", prompt_token_ids=list(range(num_tokens)), sampling_params=SamplingParams()
    )
    sequence = Sequence(seq_id, request, max_tokens)
    sequence.block_table = blocks
    sequence.slot = 1
    return sequence


def compute_ahead(entry: ScheduledSequence) -> RunAhead:
    tables = DeviceTables(2, 6)
    launch = make_launch(shares_ahead([entry], BLOCK_SIZE), tables, BLOCK_SIZE, vocab_size=100)
    return RunAhead(PendingTokens(launch, torch.empty(1), NoEvent(), []), BLOCK_SIZE)


def test_the_token_after_the_one_that_is_sampled_is_computed_ahead() -> None:
    sequence = make_sequence(5, [7, 3])
    (share,) = shares_ahead([ScheduledSequence(sequence, 2, 3)], BLOCK_SIZE)
    assert (share.start, share.count, share.is_wanted, share.is_ahead) == (5, 1, True, True)
    assert share.make_draw().position == 1


@pytest.mark.parametrize(
    ("num_tokens", "blocks", "max_tokens", "count"),
    [
        (5, [7, 3], 10, 2),  # a chunk that does not end at the last token
        (5, [7, 3], 1, 5),  # the token that is sampled is the last one
        (4, [7], 10, 4),  # the block for it is not there yet
    ],
)
def test_what_is_not_as_usual_is_not_computed_ahead(
    num_tokens: int, blocks: list[int], max_tokens: int, count: int
) -> None:
    entry = ScheduledSequence(make_sequence(num_tokens, blocks, max_tokens), 0, count)
    assert shares_ahead([entry], BLOCK_SIZE) == []


def test_the_last_token_but_one_and_a_block_reserved_ahead_are_used() -> None:
    assert len(shares_ahead([ScheduledSequence(make_sequence(5, [7, 3], 2), 0, 5)], BLOCK_SIZE)) == 1
    assert len(shares_ahead([ScheduledSequence(make_sequence(4, [7, 3]), 3, 1)], BLOCK_SIZE)) == 1


def test_what_the_scheduler_then_wants_is_taken() -> None:
    sequence = make_sequence(4, [7, 3])
    ahead = compute_ahead(ScheduledSequence(sequence, 3, 1))
    sequence.token_ids.append(9)
    assert ahead.has(ScheduledSequence(sequence, 4, 1))
    assert not ahead.has(ScheduledSequence(make_sequence(5, [7, 3], seq_id=1), 4, 1))
    ahead.drop(sequence.seq_id)
    assert not ahead.has(ScheduledSequence(sequence, 4, 1))


def test_a_token_in_another_block_position_or_life_is_not_taken() -> None:
    sequence = make_sequence(4, [7, 3])
    ahead = compute_ahead(ScheduledSequence(sequence, 3, 1))
    sequence.token_ids += [9, 9]
    assert not ahead.has(ScheduledSequence(sequence, 5, 1))
    assert not ahead.has(ScheduledSequence(sequence, 4, 2))
    sequence.block_table = [7, 5]  # the block reserved ahead was taken back and replaced
    assert not ahead.has(ScheduledSequence(sequence, 4, 1))
    sequence.block_table = [7, 3]
    assert ahead.has(ScheduledSequence(sequence, 4, 1))
    sequence.num_preemptions += 1
    assert not ahead.has(ScheduledSequence(sequence, 4, 1))


# ---- block tables on the device ----------------------------------------------------------------------


def apply(tables: DeviceTables, device: "np.ndarray[tuple[int, int], np.dtype[np.int32]]") -> int:
    """Do what the device is told; return how many entries that were."""
    places, values = tables.take_changes()
    device.reshape(-1)[places] = values
    assert np.array_equal(device, tables.host)
    return len(places)


def test_only_changes_are_sent() -> None:
    tables, device = DeviceTables(2, 6), np.zeros((3, 6), np.int32)
    sequence = make_sequence(9, [7, 3, 5])
    tables.update(sequence, 0, 3, BLOCK_SIZE)
    assert apply(tables, device) == 3
    tables.update(sequence, 9, 3, BLOCK_SIZE)
    assert apply(tables, device) == 0
    sequence.block_table.append(2)
    tables.update(sequence, 12, 4, BLOCK_SIZE)
    assert apply(tables, device) == 1
    assert device[1].tolist() == [7, 3, 5, 2, 0, 0]


def test_a_block_that_was_replaced_before_it_was_computed_is_sent_again() -> None:
    tables, device = DeviceTables(2, 6), np.zeros((3, 6), np.int32)
    sequence = make_sequence(8, [7, 3, 5])  # the last one is reserved ahead
    tables.update(sequence, 7, 3, BLOCK_SIZE)
    apply(tables, device)
    sequence.block_table[2] = 4
    tables.update(sequence, 8, 3, BLOCK_SIZE)
    apply(tables, device)
    assert device[1, :3].tolist() == [7, 3, 4]


def test_another_sequence_or_life_in_a_slot_is_sent_whole() -> None:
    tables, device = DeviceTables(2, 6), np.zeros((3, 6), np.int32)
    sequence = make_sequence(9, [7, 3, 5])
    tables.update(sequence, 0, 3, BLOCK_SIZE)
    apply(tables, device)
    sequence.num_preemptions, sequence.block_table = 1, [1, 2, 8]
    tables.update(sequence, 8, 3, BLOCK_SIZE)
    apply(tables, device)
    assert device[1, :3].tolist() == [1, 2, 8]
    tables.update(make_sequence(9, [4, 6, 0], seq_id=5), 8, 3, BLOCK_SIZE)
    apply(tables, device)
    assert device[1, :3].tolist() == [4, 6, 0]


def test_changes_that_were_never_sent_are_sent_after_a_reset() -> None:
    tables, device = DeviceTables(2, 6), np.zeros((3, 6), np.int32)
    sequence = make_sequence(3, [7])
    tables.update(sequence, 0, 1, BLOCK_SIZE)  # a failure: nobody takes it
    tables.forget()
    tables.update(make_sequence(3, [7], seq_id=5), 0, 1, BLOCK_SIZE)
    places, values = tables.take_changes()
    device.reshape(-1)[places] = values
    assert device[1, 0] == 7


def test_a_missing_block_is_a_bug_that_is_noticed() -> None:
    with pytest.raises(AssertionError, match="no block"):
        DeviceTables(2, 6).update(make_sequence(6, [4]), 4, 2, BLOCK_SIZE)
