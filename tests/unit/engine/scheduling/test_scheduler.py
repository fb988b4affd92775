"""What the scheduler decides, and what it says about why."""

import pytest

from engine.errors import ConfigError, ContextLengthError, QueueFullError, RequestError
from engine.records import Admitted, Finished, Preempted, Rejected, StopReason
from engine.scheduling.preemption import make_preemption_policy
from engine.sequence import FinishReason
from tests.builders import make_core, make_request, run_to_end, solo_output, stop_reasons, tokens_of
from tests.support.scheduling import events_of


def test_as_many_tokens_as_asked_are_generated() -> None:
    core = make_core()
    core.add_request(make_request(prompt=5, max_tokens=16))
    results = run_to_end(core)
    assert tokens_of(results)["r0"] == solo_output(make_request(prompt=5).prompt_token_ids, 16)
    assert events_of(results, Finished)[0].reason == FinishReason.LENGTH


def test_long_prompt_is_computed_in_chunks_within_the_budget() -> None:
    core = make_core(max_num_batched_tokens=7)
    core.add_request(make_request(prompt=20, max_tokens=1))
    chunks = [entry.num_scheduled for result in run_to_end(core) for entry in result.record.batch]
    assert chunks == [7, 7, 6]


def test_decode_goes_on_while_another_prompt_is_computed() -> None:
    core = make_core(max_num_batched_tokens=6)
    core.add_request(make_request("a", prompt=4, max_tokens=8))
    core.step()
    core.add_request(make_request("b", prompt=12, max_tokens=1))
    record = core.step().record
    assert [(entry.seq_id, entry.num_scheduled) for entry in record.batch] == [(1, 1), (2, 5)]


def test_a_pool_of_two_blocks_leaves_requests_waiting() -> None:
    core = make_core(num_blocks=2)
    for index in range(3):
        core.add_request(make_request(f"r{index}", prompt=5, max_tokens=3))
    record = core.step().record
    assert (record.num_running, record.num_waiting) == (1, 2)
    assert record.stop_reason == StopReason.NO_FREE_BLOCKS
    assert {name: len(tokens) for name, tokens in tokens_of(run_to_end(core)).items()} == {
        "r0": 2,
        "r1": 3,
        "r2": 3,
    }


def test_what_can_never_fit_is_refused_and_blocks_nobody() -> None:
    core = make_core(num_blocks=2)
    with pytest.raises(ContextLengthError, match="at most 7 fit") as caught:
        core.add_request(make_request("big", prompt=8))
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
    core.add_request(make_request("small", prompt=7, max_tokens=5))
    results = run_to_end(core)
    assert len(tokens_of(results)["small"]) == 1  # capped by what is left
    assert [event.request_id for event in events_of(results, Rejected)] == ["big"]


def test_long_and_short_requests_share_a_pool_of_four_blocks() -> None:
    core = make_core(num_blocks=4, max_num_seqs=6)
    requests = [make_request("long", prompt=6, max_tokens=10)]
    requests += [make_request(f"short{index}", prompt=3, max_tokens=4) for index in range(5)]
    for request in requests:
        core.add_request(request)
    results = run_to_end(core)
    assert len(events_of(results, Preempted)) > 0
    for request in requests:
        expected = solo_output(request.prompt_token_ids, request.sampling_params.max_tokens or 0)
        assert tokens_of(results)[request.request_id] == expected


def test_preemption_names_policy_candidates_and_beneficiary() -> None:
    core = make_core(num_blocks=4)
    for name in ("a", "b"):
        core.add_request(make_request(name, prompt=7, max_tokens=8))
    preempted = events_of(run_to_end(core), Preempted)[0]
    assert (preempted.policy, preempted.mode, preempted.seq_id, preempted.beneficiary) == (
        "newest-first",
        "recompute",
        2,
        1,
    )
    assert preempted.candidates == [(1, -1.0), (2, -2.0)]
    assert preempted.num_tokens_lost > 0
    assert preempted.num_blocks_freed > 0


def test_victim_leaves_the_plan_of_the_step_and_returns_its_budget() -> None:
    # "old" outlives "new" and asks for a block after "new" was planned in an earlier slot of the
    # running order: resumed sequences run behind younger ones.
    core = make_core(num_blocks=5, max_num_seqs=3)
    for name in ("a", "b", "c"):
        core.add_request(make_request(name, prompt=4, max_tokens=9))
    for result in run_to_end(core):
        batch = [entry.seq_id for entry in result.record.batch]
        victims = [event.seq_id for event in result.record.events if isinstance(event, Preempted)]
        assert not set(batch) & set(victims)
        assert len(set(batch)) == len(batch)


def test_slots_are_reused_from_the_lowest_and_kept_on_resume() -> None:
    core = make_core(num_blocks=6)
    for name in ("a", "b", "c"):
        core.add_request(make_request(name, prompt=6, max_tokens=8))
    admitted: dict[int, list[int]] = {}
    for event in events_of(run_to_end(core), Admitted):
        admitted.setdefault(event.seq_id, []).append(event.slot)
    assert [slots[0] for slots in admitted.values()] == [0, 1, 2]
    assert all(len(set(slots)) == 1 for slots in admitted.values())
    assert any(len(slots) > 1 for slots in admitted.values())


def test_stop_reasons_are_exact() -> None:
    core = make_core(max_num_seqs=2, num_blocks=64, max_num_batched_tokens=8)
    for index in range(4):
        core.add_request(make_request(f"r{index}", prompt=9 - index, max_tokens=3))
    reasons = [StopReason(result.record.stop_reason) for result in run_to_end(core)]
    assert reasons[:2] == [StopReason.TOKEN_BUDGET, StopReason.PROMPT_ENDS]
    assert StopReason.MAX_NUM_SEQS in reasons
    assert reasons[-1] is StopReason.QUEUE_EMPTY


def test_watermark_keeps_room_for_those_that_run() -> None:
    core = make_core(num_blocks=8, watermark=0.3, max_num_batched_tokens=30)
    core.add_request(make_request("a", prompt=16, max_tokens=2))
    core.add_request(make_request("b", prompt=11, max_tokens=2))
    assert core.step().record.stop_reason == StopReason.WATERMARK


def test_equal_prompts_wait_for_the_first_and_then_share_its_blocks() -> None:
    core = make_core(num_blocks=32, max_num_batched_tokens=64)
    prompt = make_request(prompt=13).prompt_token_ids
    for index in range(4):
        core.add_request(make_request(f"r{index}", prompt=prompt, max_tokens=3))
    first = core.step().record
    assert first.stop_reason == StopReason.PREFIX_PENDING
    assert first.prefix_pending == [2, 3, 4]
    results = run_to_end(core)
    assert [event.num_cached_tokens for event in events_of(results, Admitted)] == [12, 12, 12]
    assert all(tokens == solo_output(prompt, 3)[-len(tokens) :] for tokens in tokens_of(results).values())


def test_a_sequence_waiting_for_a_prefix_does_not_hold_up_others() -> None:
    core = make_core(num_blocks=32, max_num_batched_tokens=64)
    prompt = make_request(prompt=13).prompt_token_ids
    for name in ("a", "b"):
        core.add_request(make_request(name, prompt=prompt, max_tokens=2))
    core.add_request(make_request("other", prompt=[500, 501, 502], max_tokens=2))
    assert [entry.seq_id for entry in core.step().record.batch] == [1, 3]


def test_any_number_may_wait_for_a_prefix_and_still_block_nobody() -> None:
    core = make_core(max_num_seqs=3, num_blocks=32, max_num_batched_tokens=64)
    prompt = make_request(prompt=13).prompt_token_ids
    for index in range(8):
        core.add_request(make_request(f"same{index}", prompt=prompt, max_tokens=2))
    core.add_request(make_request("other", prompt=[500, 501, 502], max_tokens=2))
    record = core.step().record
    assert [entry.seq_id for entry in record.batch] == [1, 9]
    assert record.prefix_pending == [2, 3, 4, 5, 6, 7, 8]


def test_prefix_wait_ends_when_the_computing_sequence_is_aborted() -> None:
    core = make_core(num_blocks=32, max_num_batched_tokens=5)
    prompt = make_request(prompt=13).prompt_token_ids
    for name in ("a", "b"):
        core.add_request(make_request(name, prompt=prompt, max_tokens=2))
    core.step()
    core.abort("a")
    assert [entry.seq_id for entry in core.step().record.batch] == [2]


@pytest.mark.parametrize("running", [True, False])
def test_abort_frees_everything_within_a_step(running: bool) -> None:
    core = make_core(num_blocks=32)
    core.add_request(make_request("a", prompt=9, max_tokens=20))
    if running:
        core.step()
    core.abort("a")
    core.abort("a")
    core.abort("never heard of")
    result = core.flush()
    assert result is not None
    assert [(output.request_id, output.finish_reason) for output in result.outputs] == [("a", "abort")]
    assert result.record.num_used == 0
    assert not core.has_work
    assert core.flush() is None
    core.check_integrity()


def test_stop_ends_one_choice_as_complete() -> None:
    core = make_core(num_blocks=32)
    for choice_index in range(2):
        core.add_request(make_request("a", prompt=9, max_tokens=6, choice_index=choice_index))
    core.step()
    core.step()
    core.stop("a", 0)
    finished = [output for result in run_to_end(core) for output in result.outputs if output.finish_reason]
    assert sorted((output.choice_index, output.finish_reason) for output in finished) == [
        (0, "stop"),
        (1, "length"),
    ]


def test_end_token_ends_unless_ignored() -> None:
    prompt = make_request(prompt=5).prompt_token_ids
    third = solo_output(prompt, 3)[2]
    core = make_core(eos_token_ids=frozenset({third}))
    core.add_request(make_request("eos", prompt=prompt, max_tokens=8))
    core.add_request(make_request("ignore", prompt=prompt, max_tokens=8, ignore_eos=True))
    core.add_request(
        make_request("stop_id", prompt=prompt, max_tokens=8, ignore_eos=True, stop_token_ids=(third,))
    )
    tokens = tokens_of(run_to_end(core))
    assert [len(tokens[name]) for name in ("eos", "ignore", "stop_id")] == [3, 8, 3]


def test_bad_requests_are_refused_with_the_field() -> None:
    core = make_core(max_waiting=1)
    for prompt in ([], [-1], [1000], [2**40]):
        with pytest.raises(RequestError) as caught:
            core.add_request(make_request("x", prompt=prompt))
        assert caught.value.param == "prompt"
    core.add_request(make_request("a"))
    with pytest.raises(QueueFullError):
        core.add_request(make_request("b"))
    core = make_core()
    core.add_request(make_request("a"))
    with pytest.raises(RequestError, match="running already"):
        core.add_request(make_request("a"))


def test_choices_of_a_request_are_queued_together_or_not_at_all() -> None:
    core = make_core(max_waiting=3)
    with pytest.raises(RequestError, match="4 answers; at most 3") as caught:
        core.add_requests([make_request("a", choice_index=index) for index in range(4)])
    assert caught.value.param == "n"  # waiting would not help
    with pytest.raises(RequestError):
        core.add_requests([make_request("b"), make_request("b", prompt=[])])
    with pytest.raises(RequestError, match="running already"):
        core.add_requests([make_request("c"), make_request("c")])
    result = core.flush()
    assert result is not None
    assert [type(event) for event in result.record.events] == [Rejected, Rejected, Rejected]
    core.add_requests([make_request("d", choice_index=index) for index in range(3)])
    assert [event.seq_id for event in events_of(run_to_end(core), Finished)] == [1, 2, 3]


def test_any_salt_is_taken() -> None:
    core = make_core()
    core.add_request(make_request("a", max_tokens=2, cache_salt="\ud800"))
    assert len(tokens_of(run_to_end(core))["a"]) == 2


def test_unknown_queue_policy_lists_the_known() -> None:
    with pytest.raises(ConfigError, match="fcfs"):
        make_core(policy="nonsense")


def test_unknown_preemption_policy_lists_the_known() -> None:
    with pytest.raises(ConfigError, match="newest-first"):
        make_preemption_policy("random")


def test_prompt_of_whole_blocks_computes_its_last_block_again() -> None:
    core = make_core()
    prompt = make_request(prompt=8).prompt_token_ids
    for name in ("a", "b"):
        core.add_request(make_request(name, prompt=prompt, max_tokens=2))
        results = run_to_end(core)
        assert tokens_of(results)[name] == solo_output(prompt, 2)
    assert events_of(results, Admitted)[0].num_cached_tokens == 4
    assert stop_reasons(results) == {StopReason.QUEUE_EMPTY}
