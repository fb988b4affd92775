"""Kinds of faults that schedulers have had, each with the smallest input that shows it."""

import random
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import ConfigError, ContextLengthError, EngineInvariantError
from engine.kv import block_hash as block_hash_module
from engine.kv.block_pool import BlockPool
from engine.records import (
    Admitted,
    Finished,
    FreeCause,
    Loaded,
    Preempted,
    Rejected,
    Stalled,
    StepResult,
)
from engine.sequence import EngineRequest, FinishReason
from engine.snapshot import EngineSnapshot
from tests.builders import (
    VOCAB_SIZE,
    folded_state,
    make_core,
    make_request,
    run_to_end,
    solo_output,
    state_from_books,
    tokens_of,
)
from tests.support.scheduling import events_of, make_loading_core, own_prompt

TINY: dict[str, Any] = {"num_blocks": 8, "block_size": 16, "max_num_batched_tokens": 64, "max_model_len": 128}
"""128 tokens in all."""


def assert_solo_outputs(results: list[StepResult], requests: list[EngineRequest]) -> None:
    """Each answer is, token by token, the one to the same request alone, and each ended once."""
    tokens = tokens_of(results)
    for request in requests:
        expected = solo_output(request.prompt_token_ids, request.sampling_params.max_tokens or 0)
        assert tokens[request.request_id] == expected, request.request_id
    ends = [output.request_id for result in results for output in result.outputs if output.finish_reason]
    assert sorted(ends) == sorted(request.request_id for request in requests)


# ---------------------------------------------------------------------- progress


def test_a_request_that_can_never_fit_is_refused_and_holds_nobody_up() -> None:
    """An unservable request at the head of the queue: more tokens than the whole pool."""
    with pytest.raises(ConfigError, match="could never run"):
        EngineConfig(num_blocks=8, block_size=16, max_model_len=256).validate()
    core = make_core(**TINY)
    with pytest.raises(ContextLengthError, match="at most 127 fit") as caught:
        core.add_request(make_request("big", prompt=200))
    assert caught.value.param == "prompt"
    small = make_request("small", prompt=5, max_tokens=3)
    core.add_request(small)
    results = run_to_end(core, max_steps=3)
    assert_solo_outputs(results, [small])
    assert [event.request_id for event in events_of(results, Rejected)] == ["big"]


def test_a_prompt_that_leaves_room_for_one_token_only_is_served() -> None:
    """The limit is exact: prompt and one token fill the pool to the last place."""
    core = make_core(**TINY)
    core.add_request(make_request("full", prompt=127, max_tokens=50))
    results = run_to_end(core)
    assert len(tokens_of(results)["full"]) == 1


@pytest.mark.parametrize("num_host_blocks", [0, 8])
def test_requests_that_each_hold_a_part_of_what_they_need_do_not_block_each_other(
    num_host_blocks: int,
) -> None:
    """Two half-admitted prompts of five blocks, in chunks of two, in a pool of eight."""
    core = make_core(**{**TINY, "max_num_batched_tokens": 32, "num_host_blocks": num_host_blocks})
    requests = [make_request(name, prompt=own_prompt(i, 80), max_tokens=4) for i, name in enumerate("ab")]
    core.add_requests(requests)
    results = run_to_end(core, max_steps=20)
    assert all(result.record.batch or events_of([result], Loaded) for result in results)
    assert_solo_outputs(results, requests)


def test_two_prefixes_that_are_half_loaded_do_not_block_each_other() -> None:
    """The same, while both prompts come back from the host tier."""
    core = make_core(**{**TINY, "max_num_batched_tokens": 32, "num_host_blocks": 20, "load_steps": 4})
    prompts = [own_prompt(i, 70) for i in range(2)]
    for index, prompt in enumerate([*prompts, own_prompt(9, 120)]):
        core.add_request(make_request(f"before{index}", prompt=prompt, max_tokens=1))
        run_to_end(core)
    requests = [make_request(f"r{i}", prompt=[*prompts[i], *range(30)], max_tokens=9) for i in range(2)]
    core.add_requests(requests)
    results = run_to_end(core, max_steps=60)
    assert len(events_of(results, Loaded)) >= 2
    assert_solo_outputs(results, requests)


def test_an_engine_with_waiting_requests_is_never_idle() -> None:
    """An idle engine with a full queue: aborts and long prompts, mixed; each step advances somebody."""
    rng = random.Random(5)
    core = make_core(**TINY)
    for index in range(200):
        prompt = own_prompt(rng.randrange(39), rng.choice([3, 20, 90, 120]))
        core.add_request(make_request(f"r{index}", prompt=prompt, max_tokens=rng.randrange(1, 9)))
        if rng.random() < 0.5:
            core.abort(f"r{rng.randrange(index + 1)}")
        if rng.random() < 0.5 and core.has_work:
            result = core.step()
            assert result.record.num_running > 0 or result.record.num_waiting == 0 or result.record.batch
    results = run_to_end(core)
    assert all(result.record.batch for result in results)
    assert not events_of(results, Stalled)


def test_a_stalled_engine_ends_the_first_in_the_queue_and_goes_on() -> None:
    """If the books are broken so that nobody can be admitted: it is on record, one pays, the rest lives."""
    core = make_core(**TINY)
    stolen = [core.scheduler.state.kv.pool.allocate(0) for _ in range(4)]  # belong to nobody
    requests = [make_request("big", prompt=100), make_request("small", prompt=9, max_tokens=3)]
    core.add_requests(requests)
    results = [core.step()]
    (stalled,) = events_of(results, Stalled)
    assert (stalled.seq_id, stalled.num_running, stalled.num_waiting, stalled.num_available) == (1, 0, 2, 4)
    (ended,) = results[0].outputs
    assert (ended.request_id, ended.finish_reason) == ("big", FinishReason.ERROR)
    while core.has_work:
        results.append(core.step())
    assert tokens_of(results)["small"] == solo_output(requests[1].prompt_token_ids, 3)
    snapshot = EngineSnapshot(core.config)
    for result in results:
        snapshot.apply(result.record)
    assert (snapshot.totals.num_stalls, snapshot.totals.num_failed) == (1, 1)
    with pytest.raises(EngineInvariantError):  # what the host of an idle engine looks for
        core.check_integrity()
    result = core.fail_all("leaked blocks")
    assert (result.outputs, result.record.num_free) == ([], 8)
    assert len(stolen) == 4
    core.check_integrity()


@pytest.mark.parametrize(("num_host_blocks", "load_steps"), [(0, 1), (20, 1), (20, 5)])
def test_preemptions_do_not_thrash_while_blocks_are_given_back_late(
    num_host_blocks: int, load_steps: int
) -> None:
    """Four answers of forty tokens; blocks that loads write to stay taken, and nobody is preempted for it."""
    core = make_core(
        **{**TINY, "num_blocks": 5, "num_host_blocks": num_host_blocks, "load_steps": load_steps}
    )
    requests = [make_request(f"r{i}", prompt=own_prompt(i, 14), max_tokens=40) for i in range(4)]
    core.add_requests(requests)
    results = run_to_end(core, max_steps=400)
    assert_solo_outputs(results, requests)
    assert events_of(results, Preempted)
    for result in results:
        assert len(events_of([result], Preempted)) <= 3
        assert result.record.batch or events_of([result], Loaded)
    sampled = [sum(entry.token_id >= 0 for entry in result.record.batch) for result in results]
    idle = max(len(run) for run in "".join("x" if count else "." for count in sampled).split("x"))
    assert idle <= 2, "so many steps without a token"


def test_a_victim_gives_its_blocks_at_once_and_no_second_one_is_taken_for_nothing() -> None:
    """As soon as enough has been given back, nobody else has to go."""
    core = make_core(num_blocks=6, lookahead=False, max_num_batched_tokens=32)
    for index in range(3):
        core.add_request(make_request(f"r{index}", prompt=own_prompt(index, 7), max_tokens=9))
    results = run_to_end(core)
    assert max(len(events_of([result], Preempted)) for result in results) == 1


# ---------------------------------------------------------------------- what is computed again


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_preempted_answer_is_the_same_in_tokens_number_and_reason(mode: str) -> None:
    """Generated tokens are part of what is rebuilt; none is lost, none is given twice."""
    core = make_core(**{**TINY, "num_blocks": 6, "preemption_mode": mode, "num_host_blocks": 6})
    requests = [
        make_request(f"r{i}", prompt=own_prompt(i, 30), max_tokens=60, temperature=0.0) for i in range(2)
    ]
    core.add_requests(requests)
    results = run_to_end(core)
    assert {event.mode for event in events_of(results, Preempted)} == {mode}
    assert_solo_outputs(results, requests)
    assert [(end.reason, end.num_output_tokens) for end in events_of(results, Finished)] == [
        ("length", 60)
    ] * 2


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_resumed_prompt_shorter_than_its_answer_is_no_decode(mode: str) -> None:
    """Preempted with three generated tokens after a prompt of three: all six are computed in one go."""
    core = make_core(
        num_blocks=16, preemption_mode=mode, num_host_blocks=4, enable_prefix_caching=False, max_num_seqs=2
    )
    core.add_requests([make_request(name, prompt=[i + 1, 2, 3], max_tokens=9) for i, name in enumerate("ab")])
    results = [core.step() for _ in range(3)]
    victim, other = reversed(core.scheduler.state.running)
    assert (victim.num_prompt_tokens, victim.num_output_tokens) == (3, 3)
    core.scheduler.state.preempt(other, [victim], "block")
    resumed = core.step()
    kept = 4 if mode == "swap" else 0
    if kept:
        results.append(resumed)
        resumed = core.step()
    (entry,) = [entry for entry in resumed.record.batch if entry.seq_id == victim.seq_id]
    assert (entry.num_computed_before, entry.num_scheduled, entry.is_decode) == (kept, 6 - kept, False)
    results += [resumed, *run_to_end(core)]
    for index, name in enumerate("ab"):
        assert tokens_of(results)[name] == solo_output([index + 1, 2, 3], 9)


# ---------------------------------------------------------------------- what is taken from the cache


@pytest.mark.parametrize("num_blocks_of_prompt", [1, 2, 3])
@pytest.mark.parametrize("max_num_batched_tokens", [16, 64])
def test_a_prompt_of_whole_cached_blocks_still_computes_its_last_token(
    num_blocks_of_prompt: int, max_num_batched_tokens: int
) -> None:
    """A prompt whose length is a multiple of the block size, sent twice."""
    core = make_core(**{**TINY, "max_num_batched_tokens": max_num_batched_tokens})
    prompt = own_prompt(1, 16 * num_blocks_of_prompt)
    for name in ("a", "b", "c"):
        core.add_request(make_request(name, prompt=prompt, max_tokens=4))
        results = run_to_end(core)
        assert tokens_of(results)[name] == solo_output(prompt, 4)
    (admitted,) = events_of(results, Admitted)
    assert admitted.num_cached_tokens == len(prompt) - 16
    assert results[-1].outputs[0].num_cached_tokens == len(prompt) - 16


def test_the_budget_is_counted_after_the_cache_hit() -> None:
    """Six requests with three shared blocks in a tiny pool; victims hit their own blocks again."""
    core = make_core(num_blocks=9, max_num_seqs=6, max_num_batched_tokens=14, max_model_len=36)
    prefix = own_prompt(1, 12)
    requests = [make_request(f"r{i}", prompt=[*prefix, 500 + i], max_tokens=16) for i in range(6)]
    core.add_requests(requests)
    results = run_to_end(core)
    assert_solo_outputs(results, requests)
    for result in results:
        assert sum(entry.num_scheduled for entry in result.record.batch) <= 14
    resumed = [event for event in events_of(results, Admitted) if event.resumed]
    assert any(event.num_cached_tokens > 12 for event in resumed)  # its own blocks, too
    first = {event.seq_id: event for event in reversed(events_of(results, Admitted))}
    assert [first[seq_id].num_cached_tokens for seq_id in range(2, 7)] == [12] * 5


def test_hits_of_an_attempt_that_failed_are_looked_up_again() -> None:
    """While a request waits for room, its cached prefix is evicted; then it is admitted."""
    core = make_core(
        num_blocks=6, max_model_len=24, max_num_batched_tokens=24, lookahead=False, watermark=0.0
    )
    prefix = own_prompt(1, 8)
    core.add_request(make_request("before", prompt=prefix, max_tokens=1))
    run_to_end(core)
    evicting = make_request("b", prompt=own_prompt(2, 13), max_tokens=11)
    waiting = make_request("a", prompt=[*prefix, *own_prompt(3, 9)], max_tokens=2)
    core.add_requests([evicting])
    results = [core.step()]
    core.add_requests([waiting])
    results.append(core.step())
    (sequence,) = core.scheduler.state.waiting
    assert len(sequence.prefix_hits) == 2
    results += run_to_end(core)
    assert_solo_outputs(results, [evicting, waiting])
    assert events_of(results, Admitted)[-1].num_cached_tokens < 8


def test_what_was_found_in_the_host_tier_is_looked_up_again_after_victims_were_swapped_out() -> None:
    """A newcomer finds its prefix in host memory, then its victim's blocks push that out."""
    core = make_core(
        num_blocks=6,
        num_host_blocks=6,
        max_model_len=24,
        max_num_batched_tokens=24,
        policy="priority",
        preemption_mode="swap",
        lookahead=False,
    )
    prefix = own_prompt(1, 9)
    for name, prompt in (("before", prefix), ("evicts it", own_prompt(2, 23))):
        core.add_request(make_request(name, prompt=prompt, max_tokens=1))
        run_to_end(core)
    bulk = make_request("bulk", prompt=own_prompt(3, 18), max_tokens=4, priority=10)
    core.add_request(bulk)
    results = [core.step()]
    assert core.scheduler.state.kv.host.num_used == 6  # all, and the prefix was used longest ago
    premium = make_request("premium", prompt=prefix, max_tokens=2, priority=-10)
    core.add_request(premium)
    results += run_to_end(core)
    assert events_of(results, Preempted)[0].mode == "swap"
    assert_solo_outputs(results, [bulk, premium])


@pytest.mark.parametrize("num_host_blocks", [0, 8])
def test_equal_hashes_of_other_tokens_never_give_foreign_content(
    monkeypatch: pytest.MonkeyPatch, num_host_blocks: int
) -> None:
    """A hash that is the same for all: every answer is still the right one, also from the host tier."""
    monkeypatch.setattr(block_hash_module, "hash_block", lambda *_: b"same" * 8)
    core = make_core(num_blocks=6, max_model_len=24, num_host_blocks=num_host_blocks)
    requests = [
        make_request(f"r{index}", prompt=own_prompt(number, 10), max_tokens=6)
        for index, number in enumerate([1, 2, 1, 3, 2, 1])
    ]
    core.add_requests(requests)
    assert_solo_outputs(run_to_end(core), requests)


@pytest.mark.parametrize("seed", range(5))
def test_answers_under_eviction_pressure_are_those_of_a_quiet_run(seed: int) -> None:
    """Twenty requests over three shared prefixes in a tiny pool; the next token hashes all earlier ones."""
    rng = random.Random(seed)
    core = make_core(num_blocks=8, max_num_seqs=4)
    requests = [
        make_request(
            f"r{index}",
            prompt=[*own_prompt(rng.randrange(3), rng.randrange(1, 20)), rng.randrange(VOCAB_SIZE)],
            max_tokens=rng.randrange(1, 9),
        )
        for index in range(20)
    ]
    core.add_requests(requests)
    results = run_to_end(core)
    assert_solo_outputs(results, requests)
    assert core.scheduler.state.kv.pool.num_evictions > 0


# ---------------------------------------------------------------------- accounting


def test_a_block_that_is_freed_twice_never_gets_two_owners() -> None:
    """A list with a block twice: it shows, and the block is in the free list once."""
    pool = BlockPool(4)
    held = [pool.allocate(0), pool.allocate(0)]
    with pytest.raises(EngineInvariantError, match=f"block {held[0]} is freed twice"):
        pool.free([held[0], held[0]], 0, FreeCause.FINISHED)
    pool.check_integrity()
    assert (pool.num_available, pool.num_used) == (3, 1)
    taken = [pool.allocate(1) for _ in range(3)]
    assert len({*taken, held[1]}) == 4


def test_eight_answers_to_one_prompt_that_end_together_free_each_block_once() -> None:
    """Shared blocks have eight owners, and all leave in the same step."""
    core = make_core(num_blocks=32, max_num_seqs=8, max_num_batched_tokens=32)
    core.add_requests([make_request("a", prompt=13, max_tokens=5, choice_index=index) for index in range(8)])
    results = run_to_end(core)
    last = results[-1].record
    assert sum(isinstance(event, Finished) for event in last.events) >= 7
    assert (last.num_used, last.num_free + last.num_cached) == (0, 32)


def test_after_hundreds_of_short_requests_no_block_is_missing() -> None:
    """256 at once, in chunks; after each step and at the end, free, cached and used make up the pool."""
    core = make_core(num_blocks=24, max_num_seqs=16, max_num_batched_tokens=20, max_model_len=60)
    snapshot = EngineSnapshot(core.config)
    core.add_requests(
        [make_request(f"r{i}", prompt=own_prompt(i % 30, 9 + i % 5), max_tokens=3) for i in range(256)]
    )
    results = run_to_end(core)
    for result in results:
        snapshot.apply(result.record)
        counts = result.record.num_free, result.record.num_cached, result.record.num_used
        assert sum(counts) == 24
    assert counts[2] == 0
    assert folded_state(snapshot) == state_from_books(core)


# ---------------------------------------------------------------------- aborts while blocks are loaded


def begin_load(core: EngineCore, name: str, prompt: list[int]) -> list[StepResult]:
    """Let a request begin to load beside another one that keeps the engine busy."""
    core.add_request(make_request(f"busy {name}", prompt=own_prompt(20, 3), max_tokens=8))
    results = [core.step()]
    core.add_request(make_request(name, prompt=prompt, max_tokens=4))
    return [*results, core.step()]


@pytest.mark.parametrize("load_steps", [1, 3, 10**6])
def test_an_abort_while_blocks_are_loaded_loses_none(load_steps: int) -> None:
    """Fifty requests that begin to load and are left at once: the pool is as large as before."""
    core, prompt = make_loading_core(load_steps)
    num_orphans = 0
    for index in range(50):
        begin_load(core, f"r{index}", prompt)
        core.abort(f"r{index}")
        results = run_to_end(core, max_steps=12)
        num_orphans += sum(event.is_orphan for event in events_of(results, Loaded))
        state = core.scheduler.state
        assert (state.kv.pool.num_used, state.kv.host.num_pinned, state.kv.loads) == (0, 0, {})
        evicts = make_request(f"e{index}", prompt=own_prompt(2 + index % 7, 31), max_tokens=1)
        core.add_request(evicts)
        assert_solo_outputs(run_to_end(core), [evicts])
    assert num_orphans == (0 if load_steps == 1 else 50)


def test_an_abort_of_the_only_request_while_it_is_loaded_ends_with_the_load() -> None:
    """Nobody is left, but the engine goes on until the copy has ended."""
    core, prompt = make_loading_core(10**6)
    begin_load(core, "left", prompt)
    core.abort("left")
    core.abort("busy left")
    assert core.has_work
    results = run_to_end(core, max_steps=1)
    (loaded,) = events_of(results, Loaded)
    assert (loaded.is_orphan, loaded.num_blocks, results[-1].record.num_used) == (True, 4, 0)


def test_nobody_gets_blocks_or_slot_of_a_load_before_it_has_ended() -> None:
    """The orphan's copy still writes; a newcomer computes beside it, in other blocks and another slot."""
    core, prompt = make_loading_core(10**6)
    begin_load(core, "left", prompt)
    (load,) = core.scheduler.state.kv.loads.values()
    core.abort("left")
    newcomer = make_request("newcomer", prompt=own_prompt(6, 6), max_tokens=3)
    core.add_request(newcomer)
    written = {block_id for _, block_id in load.pairs}
    results = []
    while load.load_id in core.scheduler.state.kv.loads:
        for sequence in core.scheduler.state.running:
            assert not written.intersection(sequence.block_table)
            assert sequence.slot != load.slot
        results.append(core.step())
        core.check_integrity()
    assert tokens_of(results)["newcomer"] == solo_output(newcomer.prompt_token_ids, 3)


# ---------------------------------------------------------------------- one step's plan


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_victim_leaves_the_steps_plan_and_nobody_is_skipped(policy: str) -> None:
    """Two that run need a block in the same step, and a more urgent one arrives: who goes is not computed."""
    core = make_core(num_blocks=4, max_num_seqs=3, policy=policy, lookahead=False, max_num_batched_tokens=12)
    requests = [make_request(f"r{i}", prompt=own_prompt(i, 4), max_tokens=9, priority=i) for i in range(2)]
    core.add_requests(requests)
    results = [core.step() for _ in range(4)]
    requests.append(make_request("urgent", prompt=own_prompt(7, 4), max_tokens=9, priority=-5))
    core.add_request(requests[-1])
    while core.has_work:
        results.append(core.step())
        core.check_integrity()
        computed = [entry.seq_id for entry in results[-1].record.batch]
        victims = {event.seq_id for event in events_of([results[-1]], Preempted)}
        assert not victims.intersection(computed)
        assert len(computed) == len(set(computed))
        assert {sequence.seq_id for sequence in core.scheduler.state.running} <= set(computed)
    assert events_of(results, Preempted)
    assert_solo_outputs(results, requests)


def test_a_victims_tokens_go_back_into_the_budget() -> None:
    """What the victim was to compute is computed by others in the same step."""
    core = make_core(num_blocks=40, max_num_seqs=2, policy="priority", max_num_batched_tokens=10)
    core.add_request(make_request("calm", prompt=own_prompt(1, 3), max_tokens=9))
    core.step()
    core.add_request(make_request("bulk", prompt=own_prompt(2, 14), max_tokens=9, priority=10))
    core.step()
    core.add_request(make_request("urgent", prompt=own_prompt(3, 9), max_tokens=9, priority=-10))
    record = core.step().record
    assert [event.seq_id for event in record.events if isinstance(event, Preempted)] == [2]
    assert [(entry.seq_id, entry.num_scheduled) for entry in record.batch] == [(1, 1), (3, 9)]
