import dataclasses

import pytest

from app.load.traces import Trace, TraceFormat, TraceRow
from app.load.workload import TraceOptions, prompt_workload, trace_workload

OPTIONS = TraceOptions(
    model="m", max_model_len=100, vocab_size=5000, scale=1, speed=1, seed=0, ignore_eos=True
)


def make_trace(*lengths: tuple[int, int]) -> Trace:
    rows = [TraceRow(10.0 * index, prompt, output, None) for index, (prompt, output) in enumerate(lengths)]
    return Trace(TraceFormat.AZURE, rows)


def test_rows_that_outgrow_the_context_are_left_out_and_counted() -> None:
    workload = trace_workload(make_trace((90, 10), (91, 10), (5, 96), (5, 5)), OPTIONS)

    assert workload.num_skipped == 2
    assert [job.arrival_s for job in workload.jobs] == [0.0, 30.0]


def test_tokens_of_what_will_be_sent_are_counted() -> None:
    trace = trace_workload(make_trace((90, 10), (91, 10), (5, 5)), OPTIONS)
    prompts = prompt_workload([("a", "b"), ("c",)], "m", 32)

    assert (trace.num_requests, trace.num_prompt_tokens, trace.num_output_tokens) == (2, 95, 15)
    assert (prompts.num_requests, prompts.num_prompt_tokens, prompts.num_output_tokens) == (3, None, 96)


def test_trace_request_asks_for_the_recorded_lengths() -> None:
    [job] = trace_workload(make_trace((7, 3)), OPTIONS).jobs

    body = job.make_body([])

    assert (job.path, job.num_requests) == ("/v1/completions", 1)
    assert len(body.pop("prompt")) == 7
    assert body == {"model": "m", "max_tokens": 3, "temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize(("speed", "arrivals"), [(1, [0, 10, 20]), (4, [0, 2.5, 5]), (0, [0, 0, 0])])
def test_speed_shortens_the_gaps(speed: float, arrivals: list[float]) -> None:
    options = dataclasses.replace(OPTIONS, speed=speed)

    workload = trace_workload(make_trace((1, 1), (1, 1), (1, 1)), options)

    assert [job.arrival_s for job in workload.jobs] == arrivals


def test_each_turn_carries_the_conversation_so_far() -> None:
    [job] = prompt_workload([("first", "second")], "m", max_tokens=9).jobs

    assert job.num_requests == 2
    assert job.make_body([])["messages"] == [{"role": "user", "content": "first"}]
    assert job.make_body(["answer"]) == {
        "model": "m",
        "max_tokens": 9,
        "temperature": 0,
        "messages": [
            {"role": "user", "content": "first"},
            {"role": "assistant", "content": "answer"},
            {"role": "user", "content": "second"},
        ],
    }
