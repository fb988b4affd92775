"""Schedules as arrays, and what the reference attention makes of them: rows, slots, groups."""

import pytest
import torch

from engine.model.reference_attention import ReferenceAttention, ReferencePlan
from engine.model.step import to_device
from engine.runner.batch import make_inputs
from engine.sampling_params import SamplingParams
from engine.scheduling.output import ScheduledSequence
from engine.sequence import EngineRequest, Sequence

BLOCK_SIZE = 4


def make_share(token_ids: list[int], block_table: list[int], start: int, count: int) -> ScheduledSequence:
    request = EngineRequest(request_id="r", prompt_token_ids=token_ids, sampling_params=SamplingParams())
    sequence = Sequence(0, request, max_tokens=1)
    sequence.block_table = block_table
    return ScheduledSequence(sequence, start, count)


def make_plan(shares: list[ScheduledSequence], max_group_tokens: int = 1000) -> ReferencePlan:
    cpu = torch.device("cpu")
    attention = ReferenceAttention(cpu, torch.float32, 1)
    attention.max_group_tokens = max_group_tokens
    inputs = make_inputs(shares, BLOCK_SIZE)
    return attention.plan(inputs, to_device(inputs, cpu))


def test_single_tokens_come_first_by_context_and_logits_follow_the_schedule() -> None:
    shares = [
        make_share([1, 2, 3, 4, 5], [7, 3], 0, 5),  # ends at its last token
        make_share(list(range(10, 20)), [1, 2, 9], 9, 1),
        make_share([30, 31, 32, 33], [5], 1, 2),  # does not reach its last token
        make_share([40, 41], [6], 1, 1),
    ]
    inputs = make_inputs(shares, BLOCK_SIZE)
    assert inputs.input_ids.tolist() == [41, 19, 1, 2, 3, 4, 5, 31, 32]
    assert inputs.positions.tolist() == [1, 9, 0, 1, 2, 3, 4, 1, 2]
    assert inputs.slot_mapping.tolist() == [25, 37, 28, 29, 30, 31, 12, 21, 22]
    assert inputs.query_starts.tolist() == [0, 1, 2, 7, 9]
    assert inputs.context_lens.tolist() == [2, 10, 5, 3]
    assert inputs.block_tables.tolist() == [[6, 6, 6], [1, 2, 9], [7, 3, 7], [5, 5, 5]]
    assert inputs.logits_rows.tolist() == [6, 1, 0]
    assert inputs.num_decodes == 2


def test_padding_points_at_the_sequences_own_first_slot_and_is_masked() -> None:
    shares = [make_share([1, 2], [6], 1, 1), make_share([1, 2, 3, 4, 5], [2, 0], 4, 1)]
    (group,) = make_plan(shares).decode_groups
    assert (group.start, group.end) == (0, 2)
    assert group.context_slots.tolist() == [24, 25, 24, 24, 24, 8, 9, 10, 11, 0]
    inf = torch.inf
    assert group.mask.squeeze().tolist() == [[0, 0, -inf, -inf, -inf], [0, 0, 0, 0, 0]]


@pytest.mark.parametrize("max_group_tokens", [1, 7, 20, 64])
def test_groups_cover_all_single_rows_once_within_their_bound(max_group_tokens: int) -> None:
    contexts = [3, 1, 9, 2, 14, 8, 8, 1]
    shares = [make_share([0] * n, list(range(5)), n - 1, 1) for n in contexts]
    groups = make_plan(shares, max_group_tokens).decode_groups
    assert [row for group in groups for row in range(group.start, group.end)] == list(range(len(contexts)))
    for group in groups:
        assert group.end - group.start == 1 or len(group.context_slots) <= max_group_tokens


def test_a_chunk_sees_its_context_and_nothing_after_each_token() -> None:
    (chunk,) = make_plan([make_share([0] * 9, [4, 1, 3], 5, 3)]).prefill_chunks
    assert chunk.context_slots is not None
    assert chunk.mask is not None
    assert chunk.context_slots.tolist() == [16, 17, 18, 19, 4, 5, 6, 7]
    visible = (chunk.mask == 0).int().tolist()
    assert visible == [[1, 1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1, 0], [1] * 8]


def test_a_chunk_that_begins_a_sequence_needs_no_gathering() -> None:
    (chunk,) = make_plan([make_share([0] * 3, [4], 0, 3)]).prefill_chunks
    assert (chunk.start, chunk.end, chunk.context_slots, chunk.mask) == (0, 3, None, None)


def test_a_missing_block_is_a_bug_that_is_noticed() -> None:
    with pytest.raises(AssertionError, match="no block"):
        make_inputs([make_share([0] * 6, [4], 4, 1)], BLOCK_SIZE)
