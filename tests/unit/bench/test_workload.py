import random

import pytest

from bench.workload import CASES, make_workload, parse_workload, shared_prefix

pytestmark = pytest.mark.unit


def make_turns() -> list[list[int]]:
    generator = random.Random(1)
    return [[generator.randrange(49_152) for _ in range(generator.randrange(20, 120))] for _ in range(160)]


WORKLOAD = parse_workload(make_workload(make_turns()))


def test_the_same_texts_give_the_same_workload() -> None:
    assert make_workload(make_turns()) == make_workload(make_turns())


def test_lengths_are_as_documented_and_alike_in_all_variants() -> None:
    for case, count in (("W1", 1), ("W2", 64), ("W3", 32), ("W4", 100)):
        sizes = [[(len(p.token_ids), p.num_new) for p in variant] for variant in WORKLOAD.variants[case]]
        assert sizes == [sizes[0]] * 4
        assert len(sizes[0]) == count
    assert all(32 <= len(p.token_ids) <= 512 and 16 <= p.num_new <= 256 for p in WORKLOAD.variants["W2"][0])
    assert len(WORKLOAD.unit_gaps) == 100


def test_only_the_prompts_of_w3_share_a_beginning() -> None:
    assert len(shared_prefix(WORKLOAD.prompts("W3p", 0)).token_ids) >= 512
    beginnings = [
        tuple(prompt.token_ids[:16])
        for case in ("W1", "W2", "W4")
        for variant in WORKLOAD.variants[case]
        for prompt in variant
    ]
    beginnings += [tuple(variant[0].token_ids[:16]) for variant in WORKLOAD.variants["W3"]]
    assert len(set(beginnings)) == len(beginnings)


def test_measured_runs_take_variants_one_to_three_in_turn() -> None:
    for case in CASES:
        runs = [WORKLOAD.prompts(case, run) for run in range(4)]
        assert runs[0] == runs[3] == WORKLOAD.variants[case[:2]][1]
        assert runs[2] == WORKLOAD.variants[case[:2]][3]


def test_arrivals_grow_with_the_gaps_and_shrink_with_the_rate() -> None:
    slow, quick = WORKLOAD.arrivals_s(1.0), WORKLOAD.arrivals_s(2.0)
    assert slow == sorted(slow)
    assert quick[-1] == pytest.approx(slow[-1] / 2)
