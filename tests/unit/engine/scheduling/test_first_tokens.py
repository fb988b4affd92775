"""A step with a first token is not made longer by a part of a prompt that ends later."""

from typing import Any

from engine.core import EngineCore
from engine.records import Admitted, BatchEntry, Preempted, StopReason
from tests.builders import make_core, make_request, run_to_end
from tests.support.scheduling import events_of, make_loading_core, own_prompt


def sizes(batch: list[BatchEntry]) -> dict[int, int]:
    return {entry.seq_id: entry.num_scheduled for entry in batch}


def make_roomy_core(**settings: Any) -> EngineCore:
    return make_core(
        **{
            "num_blocks": 64,
            "max_model_len": 128,
            "max_num_batched_tokens": 16,
            "max_num_seqs": 8,
            **settings,
        }
    )


def test_the_next_prompt_begins_with_a_whole_budget_after_the_step_in_which_one_ends() -> None:
    core = make_roomy_core()
    core.add_request(make_request("a", prompt=20, max_tokens=4))
    core.add_request(make_request("b", prompt=25, max_tokens=4))
    records = [core.step().record for _ in range(4)]
    assert [sizes(record.batch) for record in records] == [{1: 16}, {1: 4}, {1: 1, 2: 15}, {1: 1, 2: 10}]
    reasons = [StopReason(record.stop_reason) for record in records]
    assert reasons == [
        StopReason.TOKEN_BUDGET,
        StopReason.PROMPT_ENDS,
        StopReason.QUEUE_EMPTY,
        StopReason.QUEUE_EMPTY,
    ]


def test_the_last_token_of_a_prompt_is_no_different() -> None:
    core = make_roomy_core()
    core.add_request(make_request("a", prompt=17, max_tokens=4))
    core.add_request(make_request("b", prompt=25, max_tokens=4))
    records = [core.step().record for _ in range(3)]
    assert [sizes(record.batch) for record in records] == [{1: 16}, {1: 1}, {1: 1, 2: 15}]
    assert records[1].stop_reason == StopReason.PROMPT_ENDS


def test_prompts_that_end_in_the_same_step_are_computed_together() -> None:
    core = make_roomy_core()
    for name, length in (("a", 20), ("b", 5), ("c", 7), ("d", 9), ("e", 2)):
        core.add_request(make_request(name, prompt=length, max_tokens=2))
    core.step()
    record = core.step().record
    assert sizes(record.batch) == {1: 4, 2: 5, 3: 7}
    assert record.stop_reason == StopReason.TOKEN_BUDGET
    assert sizes(core.step().record.batch) == {1: 1, 2: 1, 3: 1, 4: 9, 5: 2}


def test_nobody_passes_the_one_that_waits_for_the_next_step() -> None:
    core = make_roomy_core()
    for name, length in (("a", 10), ("long", 14), ("short", 3)):
        core.add_request(make_request(name, prompt=length, max_tokens=3))
    record = core.step().record
    assert (sizes(record.batch), record.stop_reason) == ({1: 10}, StopReason.PROMPT_ENDS)
    assert sizes(core.step().record.batch) == {1: 1, 2: 14}


def test_single_tokens_of_answers_keep_no_prompt_waiting() -> None:
    core = make_roomy_core()
    core.add_request(make_request("a", prompt=4, max_tokens=9))
    core.step()
    core.add_request(make_request("b", prompt=40, max_tokens=2))
    assert [sizes(core.step().record.batch) for _ in range(2)] == [{1: 1, 2: 15}, {1: 1, 2: 15}]


def test_what_is_cached_of_a_prompt_counts_as_computed() -> None:
    core = make_roomy_core()
    prompt = make_request(prompt=25).prompt_token_ids
    core.add_request(make_request("first", prompt=prompt, max_tokens=20))
    core.step()
    core.step()
    core.add_request(make_request("a", prompt=7, max_tokens=2))
    core.add_request(make_request("same", prompt=prompt, max_tokens=2))
    assert sizes(core.step().record.batch) == {1: 1, 2: 7, 3: 1}


def test_a_copy_from_the_host_tier_begins_beside_a_first_token() -> None:
    core, prompt = make_loading_core(load_steps=3)
    core.add_request(make_request("ends", prompt=[900, 901, 902], max_tokens=4))
    core.add_request(make_request("loads", prompt=[*prompt, 700], max_tokens=1))
    result = core.step()
    admitted = events_of([result], Admitted)
    assert [(event.num_host_tokens > 0) for event in admitted] == [False, True]
    assert [entry.num_scheduled for entry in result.record.batch] == [3]


def test_where_urgency_counts_the_rest_of_a_step_is_kept_from_nobody() -> None:
    core = make_roomy_core(policy="priority")
    core.add_request(make_request("long", prompt=60, priority=10, max_tokens=2))
    num_computed = 0
    for index in range(4):
        core.add_request(make_request(f"urgent {index}", prompt=own_prompt(index, 5), max_tokens=1))
        num_computed += sizes(core.step().record.batch).get(1, 0)
    assert num_computed == 4 * (16 - 5)


def test_an_answer_that_is_computed_again_is_not_held_up_either() -> None:
    core = make_core(num_blocks=12, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=48)
    for name in ("a", "b"):
        core.add_request(make_request(name, prompt=own_prompt(ord(name) - 97, 14), max_tokens=22))
    while not events_of([core.step()], Preempted):
        pass
    core.add_request(make_request("c", prompt=own_prompt(3, 20), max_tokens=2))
    results = run_to_end(core)
    (resumed, *_) = [event for event in events_of(results, Admitted) if event.resumed]
    last = next(
        result.record
        for result in results
        if any(
            e.seq_id == resumed.seq_id and e.num_scheduled > 1 and e.token_id >= 0
            for e in result.record.batch
        )
    )
    assert last.stop_reason == StopReason.PROMPT_ENDS
    assert 3 not in sizes(last.batch)
