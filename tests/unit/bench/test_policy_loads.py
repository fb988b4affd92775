import pytest

from bench.policy_loads import CASES, TEMPERATURES, VOCAB_SIZE, Case


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.file)
def test_a_case_fits_its_settings_and_the_model(case: Case) -> None:
    load, config = case.load(), case.config(mode="swap")

    config.validate()
    lengths = [len(request.prompt) + request.max_tokens for request in load.requests]
    assert max(lengths) <= config.max_model_len
    assert all(max(request.prompt) < VOCAB_SIZE for request in load.requests)
    assert {request.temperature for request in load.requests} == set(TEMPERATURES)
    assert load == case.load()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.file)
def test_costs_come_from_requests_that_are_not_run_for_real(case: Case) -> None:
    real, others = case.load(0, case.num_real), case.load(case.costs_from, case.num_costs)

    names = [{request.request_id for request in load.requests} for load in (real, others)]
    assert not names[0] & names[1]
    assert len(names[1]) > 50
    assert others.requests[0].arrival_ns == 0


def test_a_description_states_every_change() -> None:
    assert CASES[1].describe() == (
        "Mooncake conversation: 288 requests (12 of more than 2,048 tokens left out); prompts divided by 32 "
        "(mean 355 tokens), answers by 4 (mean 94); 1.6 times as fast as recorded; 160 blocks of 16 tokens."
    )
