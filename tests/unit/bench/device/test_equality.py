import pytest
import torch

from bench.device.engines import drive
from bench.device.equality import _TINY, TIE, Sizes, _make_limits, judge, make_prompts, top_gaps
from engine.core import EngineCore
from engine.records import Admitted, Preempted
from engine.runner.fake import FakeRunner

pytestmark = pytest.mark.unit

CLEAR, TIED = 10 * TIE, TIE / 2


def test_equal_answers_are_right_and_counted() -> None:
    verdict = judge([[1, 2, 3], [4, 5]], [[1, 2, 3], [4, 5]], [[CLEAR] * 3, [CLEAR] * 2])
    assert verdict == {"is_right": True, "tokens": 5, "compared": 5, "equal": 5, "first_wrong": None}


def test_a_token_that_differs_where_the_logits_do_is_wrong() -> None:
    verdict = judge([[1, 2, 3], [4, 5]], [[1, 2, 3], [4, 6]], [[CLEAR] * 3, [CLEAR, CLEAR]])
    assert not verdict["is_right"]
    assert verdict["first_wrong"] == {"request": 1, "position": 1, "tokens": 2}


def test_what_follows_a_tie_is_not_compared() -> None:
    verdict = judge([[1, 2, 3, 4]], [[1, 9, 9, 9]], [[CLEAR, TIED, CLEAR, CLEAR]])
    assert verdict["is_right"]
    assert (verdict["compared"], verdict["equal"]) == (1, 1)
    assert not judge([[1, 2, 3, 4]], [[8, 9, 9, 9]], [[CLEAR, TIED, CLEAR, CLEAR]])["is_right"]


def test_an_answer_of_another_length_is_wrong_even_behind_a_tie() -> None:
    assert not judge([[1, 2]], [[1]], [[TIED, CLEAR]])["is_right"]
    assert not judge([[1, 2]], [[1, 2, 3]], [[CLEAR, CLEAR]])["is_right"]


def test_a_gap_is_between_the_two_best() -> None:
    assert top_gaps(torch.tensor([[0.0, 3.0, 2.5], [-1.0, -4.0, -1.0]])) == [0.5, 0.0]


@pytest.mark.parametrize(("sizes", "least"), [(Sizes(), 5), (_TINY, 1)])
def test_the_pool_is_so_small_that_requests_are_preempted(sizes: Sizes, least: int) -> None:
    limits = _make_limits(sizes)
    runner = FakeRunner(limits.num_blocks, limits.block_size, vocab_size=sizes.vocab_size)
    run = drive(EngineCore(limits, runner), make_prompts(sizes))
    assert run.is_complete
    events = [event for record in run.records for event in record.events]
    assert sum(isinstance(event, Preempted) for event in events) >= least
    if sizes == Sizes():
        assert sum(isinstance(event, Admitted) and event.num_cached_tokens > 0 for event in events) > 5
        assert any(entry.num_scheduled > 100 for record in run.records for entry in record.batch)
