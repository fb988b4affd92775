"""Priorities: who goes first, who may take whose place, and that nobody starves."""

import random
from typing import Any

import pytest

from engine.records import Admitted, Arrived, Policies, Preempted, StepResult, StopReason
from engine.scheduling.queue import PriorityOrder, QueueOrder, WaitingQueue, make_queue_order
from engine.sequence import Sequence
from tests.builders import make_request, run_to_end, tokens_of
from tests.support.scheduling import S, events_of, make_timed_core, own_prompt

PREMIUM, STANDARD, BULK = -10, 0, 10


def sequence(seq_id: int, *, priority: int = 0, due_ns: int = 0) -> Sequence:
    return Sequence(seq_id, make_request(str(seq_id), priority=priority), 4, due_ns)


def test_the_queue_is_sorted_by_its_order_whatever_comes_and_goes() -> None:
    rng = random.Random(1)
    queue = WaitingQueue(PriorityOrder())
    inside: list[Sequence] = []
    for seq_id in range(300):
        if inside and rng.random() < 0.4:
            queue.remove(inside.pop(rng.randrange(len(inside))))
        inside.append(sequence(seq_id, due_ns=rng.randrange(20)))
        queue.add(inside[-1])
        assert list(queue) == sorted(inside, key=lambda one: (one.due_ns, one.seq_id))
    queue.reorder(QueueOrder())
    assert list(queue) == sorted(inside, key=lambda one: one.seq_id)
    with pytest.raises(KeyError):
        queue.remove(sequence(1000))


def test_a_request_stands_where_one_of_priority_zero_would_that_came_later() -> None:
    core, clock = make_timed_core(policy="priority", priority_ageing_s=2.0)
    clock.now_ns = 7 * S
    core.add_request(make_request("a", priority=BULK))
    core.add_request(make_request("b", priority=PREMIUM))
    arrived = events_of([core.step()], Arrived)
    assert [(event.priority, event.due_ns) for event in arrived] == [(10, 27 * S), (-10, -13 * S)]


@pytest.mark.parametrize(
    ("policy", "admitted"),
    [("fcfs", ["bulk", "standard", "premium"]), ("priority", ["premium", "standard", "bulk"])],
)
def test_priorities_count_under_the_policy_that_looks_at_them(policy: str, admitted: list[str]) -> None:
    core, _ = make_timed_core(policy=policy, max_num_seqs=1)
    for name, priority in (("bulk", BULK), ("standard", STANDARD), ("premium", PREMIUM)):
        core.add_request(make_request(name, priority=priority, max_tokens=1))
    assert list(tokens_of(run_to_end(core))) == admitted


def test_a_change_of_policy_reorders_those_who_wait() -> None:
    core, _ = make_timed_core(max_num_seqs=1)
    for index, priority in enumerate((STANDARD, BULK, PREMIUM)):
        core.add_request(make_request(f"r{index}", priority=priority, max_tokens=2))
    core.step()
    core.set_policies(Policies("priority", "newest-first", "auto"))
    results = run_to_end(core)
    assert [event.seq_id for event in events_of(results, Admitted)] == [3, 1, 2]  # it also interrupts


@pytest.mark.parametrize(
    ("priority", "due_ns", "may"),
    [(BULK, 5, True), (BULK, -5, False), (STANDARD, 5, False), (PREMIUM, 5, False)],
)
def test_only_the_less_urgent_that_have_not_aged_may_be_interrupted(
    priority: int, due_ns: int, may: bool
) -> None:
    order, newcomer = make_queue_order("priority"), sequence(9, priority=STANDARD)
    assert order.may_interrupt(newcomer, sequence(1, priority=priority, due_ns=due_ns)) is may
    assert not make_queue_order("fcfs").may_interrupt(newcomer, sequence(1, priority=priority, due_ns=due_ns))
    assert order.may_displace(newcomer, sequence(1, priority=priority, due_ns=due_ns)) is (
        may or priority == STANDARD
    )


# ---------------------------------------------------------------------- starvation

AGEING_S = 0.05
STEP_NS = S // 100
NUM_TOKENS = 8
MAX_NUM_SEQS = 2
SERVED_EACH = NUM_TOKENS * STEP_NS // MAX_NUM_SEQS  # a request leaves the engine so often


def overload(ageing_s: float, priorities: tuple[int, int], num_steps: int) -> list[StepResult]:
    """Send urgent requests at 120 % of what can be served, forever, and five others at the beginning."""
    core, clock = make_timed_core(
        policy="priority",
        priority_ageing_s=ageing_s,
        max_num_seqs=MAX_NUM_SEQS,
        num_blocks=32,
        max_waiting=10_000,
    )
    results: list[StepResult] = []
    urgent, other = priorities
    for index in range(5):
        core.add_request(
            make_request(f"bulk{index}", prompt=own_prompt(index, 5), max_tokens=NUM_TOKENS, priority=other)
        )
    num_sent = 0
    for _ in range(num_steps):
        while num_sent * SERVED_EACH <= clock.now_ns * 1.2:
            prompt = own_prompt(num_sent % 30 + 5, 5)
            core.add_request(
                make_request(f"p{num_sent}", prompt=prompt, max_tokens=NUM_TOKENS, priority=urgent)
            )
            num_sent += 1
        results.append(core.step())
        clock.now_ns += STEP_NS
    return results


def test_under_a_steady_overload_every_bulk_request_ends_within_the_bound() -> None:
    results = overload(AGEING_S, (PREMIUM, BULK), 600)
    waits_ns = round((BULK - PREMIUM) * AGEING_S * S)
    assert len(tokens_of(results)) > 100
    # The bound of `PriorityOrder`: what may overtake it, what was there, and itself, one after the other.
    num_ahead = waits_ns * 1.2 / SERVED_EACH + 5
    bound_ns = num_ahead * SERVED_EACH + NUM_TOKENS * STEP_NS
    ends = {
        output.request_id: result.record.t_ns + STEP_NS
        for result in results
        for output in result.outputs
        if output.finish_reason
    }
    for index in range(5):
        assert waits_ns / 2 < ends[f"bulk{index}"] <= bound_ns


def test_nobody_who_came_after_the_ageing_time_is_admitted_before() -> None:
    results = overload(AGEING_S, (PREMIUM, BULK), 600)
    arrived = {event.seq_id: event for event in events_of(results, Arrived)}
    order = [event.seq_id for event in events_of(results, Admitted) if not event.resumed]
    bulk = [seq_id for seq_id in order if arrived[seq_id].priority == BULK]
    assert len(bulk) == 5
    num_overtakers = 0
    for seq_id in bulk:
        overtakers = [arrived[other].t_ns for other in order[: order.index(seq_id)] if other > seq_id]
        late_ns = round((BULK - PREMIUM) * AGEING_S * S)
        assert all(t_ns - arrived[seq_id].t_ns <= late_ns for t_ns in overtakers)
        num_overtakers += len(overtakers)
    assert num_overtakers > 20


def test_without_enough_ageing_the_same_load_would_starve_the_bulk() -> None:
    results = overload(1000.0, (PREMIUM, BULK), 600)
    ended = {output.request_id for result in results for output in result.outputs if output.finish_reason}
    assert len(ended) > 100
    assert not any(name.startswith("bulk") for name in ended)


def test_without_ageing_priorities_make_no_difference() -> None:
    results = overload(0.0, (PREMIUM, BULK), 60)
    assert [event.seq_id for event in events_of(results, Admitted)][:5] == [1, 2, 3, 4, 5]
    assert not events_of(results, Preempted)


# ---------------------------------------------------------------------- interruptions


def interrupt(num_bulk: int, length: int, **settings: Any) -> tuple[list[Preempted], StepResult]:
    """Let bulk sequences run, then a premium one with a prompt of `length` arrive; return who gives way."""
    core, clock = make_timed_core(**{"policy": "priority", "max_num_batched_tokens": 64, **settings})
    for index in range(num_bulk):
        core.add_request(make_request(f"b{index}", prompt=own_prompt(index, 6), max_tokens=20, priority=BULK))
    core.step()
    clock.now_ns += S
    core.add_request(make_request("premium", prompt=own_prompt(9, length), max_tokens=2, priority=PREMIUM))
    result = core.step()
    core.check_integrity()
    return events_of([result], Preempted), result


def test_a_lacking_slot_takes_one_victim() -> None:
    preempted, result = interrupt(4, 6, num_blocks=40)
    assert [event.seq_id for event in preempted] == [4]
    assert [event.seq_id for event in events_of([result], Admitted)] == [5]
    assert result.record.stop_reason == StopReason.MAX_NUM_SEQS


@pytest.mark.parametrize(("length", "victims"), [(6, []), (7, []), (9, [3]), (17, [3, 2]), (25, [3, 2, 1])])
def test_lacking_blocks_take_as_few_victims_as_are_needed(length: int, victims: list[int]) -> None:
    preempted, result = interrupt(3, length, lookahead=False, watermark=0.0)
    assert [event.seq_id for event in preempted] == victims
    assert all(event.beneficiary == 4 for event in preempted)
    assert [event.seq_id for event in events_of([result], Admitted)] == [4]


def test_nobody_is_interrupted_if_even_all_of_them_are_too_few() -> None:
    core, _ = make_timed_core(policy="priority", max_num_batched_tokens=64, lookahead=False)
    core.add_request(make_request("first", prompt=own_prompt(1, 17), max_tokens=3, priority=PREMIUM))
    core.add_request(make_request("bulk", prompt=own_prompt(2, 6), max_tokens=3, priority=BULK))
    core.step()
    core.add_request(make_request("big", prompt=own_prompt(3, 20), max_tokens=2, priority=PREMIUM))
    result = core.step()
    assert not events_of([result], Preempted)
    assert result.record.stop_reason == StopReason.NO_FREE_BLOCKS


def test_nobody_is_interrupted_for_one_that_would_wait_for_its_prefix() -> None:
    core, _ = make_timed_core(policy="priority", max_num_seqs=2, num_blocks=40)
    prompt = own_prompt(1, 25)
    core.add_request(make_request("bulk", prompt=own_prompt(2, 4), max_tokens=9, priority=BULK))
    core.step()
    core.add_request(make_request("computes it", prompt=prompt, max_tokens=2, priority=PREMIUM))
    core.step()
    core.add_request(make_request("wants it", prompt=prompt, max_tokens=2, priority=PREMIUM))
    result = core.step()
    assert result.record.prefix_pending == [3]
    assert not events_of([result], Preempted)


def test_who_has_aged_is_not_interrupted() -> None:
    preempted, result = interrupt(4, 6, num_blocks=40, priority_ageing_s=0.01)
    assert not preempted
    assert result.record.stop_reason == StopReason.MAX_NUM_SEQS


def test_the_least_urgent_give_way_first() -> None:
    core, _ = make_timed_core(policy="priority", max_num_seqs=3, num_blocks=40)
    for index, priority in enumerate((BULK, STANDARD, STANDARD)):
        core.add_request(
            make_request(f"r{index}", prompt=own_prompt(index, 4), max_tokens=9, priority=priority)
        )
    core.step()
    core.add_request(make_request("premium", prompt=own_prompt(9, 4), max_tokens=2, priority=PREMIUM))
    (preempted,) = events_of([core.step()], Preempted)
    assert (preempted.seq_id, sorted(preempted.candidates)) == (1, [(1, -1.0), (2, -2.0), (3, -3.0)])


def test_whoever_is_protected_is_not_interrupted_before_it_has_generated_its_share() -> None:
    core, _ = make_timed_core(policy="priority", max_num_seqs=1, num_blocks=40, preemption_quantum=6)
    core.add_request(make_request("bulk", prompt=own_prompt(1, 4), max_tokens=20, priority=BULK))
    results = [core.step()]
    for index in range(3):
        core.add_request(
            make_request(f"p{index}", prompt=own_prompt(2 + index, 4), max_tokens=1, priority=PREMIUM)
        )
        results += [core.step() for _ in range(2)]
    generated = 0
    when_preempted = []
    for result in results + run_to_end(core):
        when_preempted += [generated for event in events_of([result], Preempted)]
        generated += sum(entry.seq_id == 1 for entry in result.record.batch)
    assert len(when_preempted) == 2
    assert when_preempted[1] - when_preempted[0] == 6


def test_nobody_slips_into_the_room_that_a_victim_left() -> None:
    core, _ = make_timed_core(policy="priority", num_blocks=8, max_num_batched_tokens=64, lookahead=False)
    core.add_request(make_request("bulk", prompt=own_prompt(1, 26), max_tokens=2, priority=BULK))
    core.step()
    core.add_request(make_request("late bulk", prompt=own_prompt(2, 4), max_tokens=1, priority=BULK))
    core.add_request(make_request("premium", prompt=own_prompt(3, 6), max_tokens=2, priority=PREMIUM))
    results = run_to_end(core)
    assert [event.seq_id for event in events_of(results, Preempted)] == [1]
    assert [event.seq_id for event in events_of(results, Admitted)] == [3, 1, 2]


def test_who_runs_and_needs_a_block_takes_it_from_the_less_urgent_first() -> None:
    core, _ = make_timed_core(policy="priority", num_blocks=6, max_num_batched_tokens=64, lookahead=False)
    for index, priority in enumerate((BULK, PREMIUM, PREMIUM)):
        core.add_request(
            make_request(f"r{index}", prompt=own_prompt(index, 6), max_tokens=9, priority=priority)
        )
    preempted = events_of(run_to_end(core), Preempted)[0]
    assert preempted.seq_id == 1  # by the policy alone, newest-first, a premium one would go
    assert preempted.beneficiary in (2, 3)


def first_step_with(results: list[StepResult], request_id: str) -> int:
    return next(
        result.record.step
        for result in results
        for output in result.outputs
        if output.request_id == request_id
    )


def test_a_long_prompt_of_little_urgency_leaves_its_tokens_to_the_more_urgent() -> None:
    core, clock = make_timed_core(
        policy="priority", num_blocks=64, max_model_len=256, max_num_batched_tokens=16, max_num_seqs=4
    )
    core.add_request(make_request("bulk", prompt=own_prompt(1, 200), priority=BULK, max_tokens=2))
    results = [core.step() for _ in range(3)]
    clock.now_ns += S // 2
    core.add_request(make_request("premium", prompt=own_prompt(2, 10), priority=PREMIUM, max_tokens=3))
    results += run_to_end(core)
    assert first_step_with(results, "premium") == 4, "it does not wait for the prompt that came before"
    sizes = {entry.seq_id: entry.num_scheduled for entry in results[3].record.batch}
    assert sizes == {1: 6, 2: 10}, "the bulk prompt takes what is left"


def test_what_was_kept_for_the_urgent_is_used_when_they_cannot_come() -> None:
    core, _ = make_timed_core(
        policy="priority",
        priority_ageing_s=0.0,
        num_blocks=16,
        max_model_len=64,
        max_num_batched_tokens=16,
        max_num_seqs=4,
        preemption_quantum=32,
    )
    core.add_request(make_request("bulk", prompt=own_prompt(1, 40), priority=BULK, max_tokens=20))
    core.step()
    bulk = core.scheduler.state.running[0]
    bulk.safe_tokens = 60  # as if it had been preempted just now: it cannot be interrupted
    core.scheduler.state.kv.try_grow(bulk, 60)
    core.add_request(make_request("premium", prompt=own_prompt(2, 30), priority=PREMIUM, max_tokens=3))
    (entry,) = core.step().record.batch
    assert entry.num_scheduled == 16


def test_a_newcomer_takes_the_slot_of_a_less_urgent_one_although_no_tokens_are_left() -> None:
    core, _ = make_timed_core(policy="priority", max_num_seqs=4, max_num_batched_tokens=4, num_blocks=40)
    for index in range(4):
        core.add_request(make_request(f"bulk{index}", prompt=1, priority=BULK, max_tokens=30))
    results = [core.step() for _ in range(6)]
    assert [entry.num_scheduled for entry in results[-1].record.batch] == [1] * 4
    core.add_request(make_request("premium", prompt=2, priority=PREMIUM, max_tokens=1))
    results += [core.step(), core.step()]
    (preempted,) = events_of(results, Preempted)
    assert (preempted.need, preempted.beneficiary) == ("slot", 5)
    assert first_step_with(results, "premium") <= 8


def test_the_record_of_an_interruption_has_all_who_might_have_gone() -> None:
    core, _ = make_timed_core(policy="priority", max_num_seqs=2, num_blocks=40)
    core.add_request(make_request("standard", priority=STANDARD, max_tokens=20))
    core.add_request(make_request("bulk", priority=BULK, max_tokens=20))
    results = [core.step() for _ in range(2)]
    core.add_request(make_request("premium", priority=PREMIUM, max_tokens=2))
    results.append(core.step())
    (preempted,) = events_of(results, Preempted)
    assert sorted(seq_id for seq_id, _ in preempted.candidates) == [1, 2]
    assert preempted.seq_id == 2, "the least urgent goes, whatever the scores"
