import pytest

from bench.timing import Answer, figures_of
from bench.workload import Prompt

pytestmark = pytest.mark.unit


def test_a_single_request_gives_first_token_and_speed_after_it() -> None:
    figures = figures_of("W1", [Prompt([1, 2], 3)], [Answer(10.0, 3, [10.5, 10.75, 11.0])], 10.0)
    assert figures == {"first_token_ms": 500.0, "decode_tok_s": 4.0}


def test_many_requests_are_timed_from_when_each_was_due() -> None:
    prompts = [Prompt([1] * 6, 2), Prompt([1] * 2, 2)]
    answers = [Answer(0.0, 2, [1.0, 2.0]), Answer(1.0, 2, [3.0, 4.0])]
    figures = figures_of("W4", prompts, answers, 0.0)
    assert figures["seconds"] == 4.0
    assert figures["output_tok_s"] == 1.0
    assert figures["total_tok_s"] == 3.0
    assert figures["first_token_p50_ms"] == 1500.0
    assert figures["inter_token_p99_ms"] == 1000.0


def test_an_answer_of_the_wrong_length_is_no_result() -> None:
    with pytest.raises(RuntimeError, match="request 0 gave 1 tokens instead of 2"):
        figures_of("W2", [Prompt([1], 2)], [Answer(0.0, 1, [1.0])], 0.0)
