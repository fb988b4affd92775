from collections import Counter

import pytest

from app.load.files import LoadError
from app.load.priorities import MAX_MIX_CHARS, assign_priorities, parse_mix, spread
from app.load.workload import Job, Workload


def test_a_mix_names_classes_with_their_shares() -> None:
    assert parse_mix("premium=0.2, bulk=.3,") == (("premium", 0.2), ("bulk", 0.3))
    assert parse_mix("") == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("premium", "no class with its share"),
        ("premium=", "no class with its share"),
        ("premium=-0.1", "no class with its share"),
        ("premium=nan", "no class with its share"),
        ("-10=0.5", "no class with its share"),
        ("premium=0.2,premium=0.3", "premium is there more than once"),
        ("premium=0.6,bulk=0.6", "add up to 1.2"),
        ("x" * (MAX_MIX_CHARS + 1), "allowed: 400"),
    ],
)
def test_what_is_no_mix_says_why(text: str, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        parse_mix(text)


def test_classes_are_spread_evenly_in_their_shares() -> None:
    names = spread([("premium", 0.2), ("bulk", 0.3), ("", 0.5)], 100)

    assert Counter(names) == {"premium": 20, "bulk": 30, "": 50}
    for start in range(0, 100, 10):
        assert Counter(names[start : start + 10]) == {"premium": 2, "bulk": 3, "": 5}


def test_requests_carry_their_class_and_the_rest_carry_none() -> None:
    jobs = [Job(0.0, "/v1/completions", 1, lambda _: {"prompt": "x"}) for _ in range(4)]
    workload = assign_priorities(Workload(jobs, num_output_tokens=9), (("bulk", 0.5),))

    bodies = [job.make_body([]) for job in workload.jobs]
    assert sorted(body.get("priority", "none") for body in bodies) == ["bulk", "bulk", "none", "none"]
    assert [job.priority for job in workload.jobs] == [body.get("priority", "") for body in bodies]
    assert workload.num_output_tokens == 9


def test_a_load_without_a_mix_stays_as_it_is() -> None:
    workload = Workload([Job(0.0, "/v1/completions", 1, lambda _: {})])
    assert assign_priorities(workload, ()) is workload
