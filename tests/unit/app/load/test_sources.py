from pathlib import Path

import pytest

from app.load.files import LoadError
from app.load.sources import (
    SHIPPED_PROMPTS,
    SHIPPED_TRACES,
    Generated,
    SourceKind,
    WorkloadOptions,
    find_kind,
    make_workload,
    read_file,
    repeat,
)
from app.load.traces import Trace
from app.resources import data_file

OPTIONS = WorkloadOptions(model="m", max_model_len=2048, vocab_size=50_000)


def generated(**values: float) -> Generated:
    fields = {
        "num_requests": 5,
        "rate_per_s": 10.0,
        "num_prompt_tokens": 40,
        "num_shared_tokens": 32,
        "num_answer_tokens": 8,
        **values,
    }
    return Generated(**fields)  # type: ignore[arg-type]  # numbers of both kinds


@pytest.mark.parametrize("name", [*SHIPPED_TRACES.values(), *SHIPPED_PROMPTS.values()])
def test_a_file_says_what_it_is(name: str) -> None:
    is_prompts = name in SHIPPED_PROMPTS.values()

    assert find_kind(data_file(name)) is (SourceKind.PROMPTS if is_prompts else SourceKind.TRACE)
    source = read_file(data_file(name), 3)
    rows = source.rows if isinstance(source, Trace) else source
    assert len(rows) == 3


def test_a_file_that_is_neither_says_what_is_expected(tmp_path: Path) -> None:
    for content in ("", "hello", '{"a": 1}'):
        path = tmp_path / "file"
        path.write_text(content)
        with pytest.raises(LoadError, match=r"empty|neither|missing"):
            read_file(path, 3)


def test_generated_prompts_share_their_beginning_and_nothing_else() -> None:
    workload = make_workload(generated(), OPTIONS)
    bodies = [job.make_body([]) for job in workload.jobs]

    assert {len(body["prompt"]) for body in bodies} == {40}
    assert len({tuple(body["prompt"][:32]) for body in bodies}) == 1
    assert len({tuple(body["prompt"][32:]) for body in bodies}) == 5
    assert {body["max_tokens"] for body in bodies} == {8}
    assert (workload.num_prompt_tokens, workload.num_output_tokens) == (200, 40)


def test_generated_prompts_may_be_shared_whole() -> None:
    workload = make_workload(generated(num_shared_tokens=99), OPTIONS)

    assert len({tuple(job.make_body([])["prompt"]) for job in workload.jobs}) == 1


def test_arrivals_follow_the_rate_and_the_seed() -> None:
    many = generated(num_requests=2000, rate_per_s=20.0)
    arrivals = [job.arrival_s for job in make_workload(many, OPTIONS).jobs]

    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(100, rel=0.1)
    assert arrivals == [job.arrival_s for job in make_workload(many, OPTIONS).jobs]
    at_once = make_workload(generated(rate_per_s=0.0), OPTIONS)
    assert {job.arrival_s for job in at_once.jobs} == {0.0}


def test_generated_requests_over_the_context_are_left_out() -> None:
    workload = make_workload(generated(num_prompt_tokens=2045), OPTIONS)

    assert (workload.jobs, workload.num_skipped) == ([], 5)


def test_copies_come_together_with_equal_prompts() -> None:
    workload = make_workload(generated(num_requests=2), OPTIONS)
    copied = repeat(workload, 3)

    assert [job.arrival_s for job in copied.jobs] == [
        job.arrival_s for job in workload.jobs for _ in range(3)
    ]
    assert copied.jobs[0].make_body([]) == copied.jobs[2].make_body([])
    assert (copied.num_requests, copied.num_prompt_tokens, copied.num_output_tokens) == (6, 240, 48)
    assert repeat(workload, 1) is workload
