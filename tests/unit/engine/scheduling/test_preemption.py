"""Which victim each policy takes, what becomes of its blocks, and that storms of preemptions end."""

import math
from itertools import pairwise

import pytest

from engine.config import EngineConfig
from engine.records import Admitted, Preempted
from engine.scheduling.preemption import (
    PREEMPTION_POLICIES,
    choose_victim,
    is_swap_better,
    make_preemption_policy,
    reckon_costs,
)
from engine.scheduling.queue import QueueOrder
from engine.sequence import Sequence
from engine.snapshot import EngineSnapshot
from tests.builders import make_config, make_core, make_request, run_to_end, solo_output, tokens_of
from tests.support.scheduling import events_of, own_prompt


def sequence(
    seq_id: int, *, computed: int = 9, left: int = 9, generated: int = 0, temperature: float = 1.0
) -> Sequence:
    request = make_request(str(seq_id), prompt=9, temperature=temperature)
    made = Sequence(seq_id, request, left + generated)
    made.num_computed_tokens = computed
    made.token_ids += [1] * generated
    return made


CANDIDATES = [
    sequence(1, computed=30, left=5, temperature=0.7),
    sequence(2, computed=12, left=2, generated=50, temperature=1.0),
    sequence(3, computed=8, left=9, temperature=1.2),
    sequence(4, computed=20, left=7, temperature=0.2),
    sequence(5, computed=25, left=40, temperature=0.9),
]


@pytest.mark.parametrize(
    ("policy", "victim", "scores"),
    [
        ("newest-first", 5, [-1, -2, -3, -4, -5]),
        ("oldest-first", 1, [1, 2, 3, 4, 5]),
        ("smallest-residual", 2, [5, 2, 9, 7, 40]),
        ("lowest-temperature", 4, [0.7, 1.0, 1.2, 0.2, 0.9]),
        ("least-computed-first", 3, [30, 12, 8, 20, 25]),
    ],
)
def test_each_policy_takes_its_victim_and_scores_all(policy: str, victim: int, scores: list[float]) -> None:
    chosen, table = choose_victim(make_preemption_policy(policy), CANDIDATES, QueueOrder.rank)
    assert chosen.seq_id == victim
    assert table == list(zip([1, 2, 3, 4, 5], scores, strict=True))


@pytest.mark.parametrize("policy", ["smallest-residual", "lowest-temperature", "least-computed-first"])
@pytest.mark.parametrize("order", [[7, 8, 9], [9, 8, 7], [8, 9, 7]])
def test_ties_go_to_the_newest_arrival(policy: str, order: list[int]) -> None:
    chosen, _ = choose_victim(
        make_preemption_policy(policy), [sequence(seq_id) for seq_id in order], QueueOrder.rank
    )
    assert chosen.seq_id == 9


@pytest.mark.parametrize(
    ("policy", "victim"),
    [
        ("newest-first", 3),
        ("oldest-first", 1),
        ("smallest-residual", 2),
        ("lowest-temperature", 3),
        ("least-computed-first", 2),
    ],
)
def test_the_engine_takes_the_policys_victim_and_records_all_candidates(policy: str, victim: int) -> None:
    core = make_core(num_blocks=7, preemption=policy, max_num_batched_tokens=32, lookahead=False)
    for index, (length, max_tokens, temperature) in enumerate([(8, 9, 1.0), (5, 6, 0.5), (7, 8, 0.0)]):
        prompt = own_prompt(index, length)
        core.add_request(
            make_request(f"r{index}", prompt=prompt, max_tokens=max_tokens, temperature=temperature)
        )
    preempted = events_of(run_to_end(core), Preempted)[0]
    assert (preempted.policy, preempted.seq_id) == (policy, victim)
    assert [seq_id for seq_id, _ in preempted.candidates] == [1, 2, 3]


@pytest.mark.parametrize("policy", PREEMPTION_POLICIES)
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("quantum", [1, 5, 16])
def test_each_further_preemption_of_a_sequence_is_paid_for_with_a_quantum_of_tokens(
    policy: str, mode: str, quantum: int
) -> None:
    core = make_core(
        num_blocks=14,
        max_num_seqs=6,
        max_model_len=56,
        preemption=policy,
        preemption_mode=mode,
        preemption_quantum=quantum,
        num_host_blocks=12,
    )
    requests = [make_request(f"r{i}", prompt=own_prompt(i, 8), max_tokens=40) for i in range(6)]
    core.add_requests(requests)
    results = run_to_end(core, max_steps=6 * (2 + 40 // quantum) * 49)
    times: dict[int, list[int]] = {}
    generated = dict.fromkeys(range(1, 7), 0)
    for result in results:
        for event in events_of([result], Preempted):
            times.setdefault(event.seq_id, []).append(generated[event.seq_id])
        for entry in result.record.batch:
            generated[entry.seq_id] += entry.token_id >= 0
    assert times
    for counts in times.values():
        assert all(later - earlier >= quantum for earlier, later in pairwise(counts))
        assert len(counts) <= 1 + 40 // quantum
    for request in requests:
        assert tokens_of(results)[request.request_id] == solo_output(request.prompt_token_ids, 40)


def test_a_preempted_sequence_comes_back_with_the_blocks_for_its_quantum() -> None:
    core = make_core(num_blocks=6, preemption_quantum=7, lookahead=False)
    for index in range(2):
        core.add_request(make_request(f"r{index}", prompt=own_prompt(index, 8), max_tokens=12))
    while core.has_work:
        result = core.step()
        for event in events_of([result], Admitted):
            if event.resumed:
                (resumed,) = [one for one in core.scheduler.state.running if one.seq_id == event.seq_id]
                assert len(resumed.block_table) == math.ceil((event.num_tokens + 7) / 4)
                return
    pytest.fail("nothing was preempted")


# ---------------------------------------------------------------------- what becomes of the blocks


@pytest.mark.parametrize(
    ("mode", "recompute_ns", "swap_ns", "swaps"),
    [
        ("recompute", 100.0, 1.0, False),
        ("swap", 1.0, 1000.0, True),
        ("auto", 100.0, 1.0, True),
        ("auto", 1.0, 1000.0, False),
        ("auto", 0.0, 0.0, True),  # not measured
        ("auto", 8.0, 64.0, False),  # a tie: 16 tokens, or a block there and back
    ],
)
def test_the_mode_is_the_cheaper_one_unless_one_is_asked_for(
    mode: str, recompute_ns: float, swap_ns: float, swaps: bool
) -> None:
    config = make_config(recompute_ns_per_token=recompute_ns, swap_ns_per_block=swap_ns, num_host_blocks=4)
    costs = reckon_costs(config, 16, 1)
    assert costs == (16 * recompute_ns, 2 * swap_ns)
    assert is_swap_better(config, mode, costs) is swaps


def test_without_a_host_tier_nothing_is_swapped() -> None:
    assert not is_swap_better(EngineConfig(), "auto", (100, 1))


def test_the_record_says_what_was_reckoned_kept_and_lost() -> None:
    core = make_core(
        num_blocks=6,
        num_host_blocks=8,
        recompute_ns_per_token=10.0,
        swap_ns_per_block=3.0,
        preemption_mode="auto",
        lookahead=False,
    )
    for index in range(2):
        core.add_request(make_request(f"r{index}", prompt=own_prompt(index, 9), max_tokens=9))
    preempted = events_of(run_to_end(core), Preempted)[0]
    assert (preempted.mode, preempted.num_tokens_kept, preempted.num_tokens_lost) == ("swap", 8, 3)
    assert (preempted.recompute_ns, preempted.swap_ns) == (110.0, 12.0)
    assert preempted.num_blocks_freed == 3


def test_a_victim_without_a_full_block_is_computed_again_whatever_the_mode() -> None:
    core = make_core(num_blocks=2, num_host_blocks=8, preemption_mode="swap", lookahead=False, block_size=8)
    for index in range(2):
        core.add_request(make_request(f"r{index}", prompt=own_prompt(index, 7 - index), max_tokens=4))
    preempted = events_of(run_to_end(core), Preempted)[0]
    assert (preempted.mode, preempted.num_tokens_kept) == ("recompute", 0)


def test_a_full_host_tier_keeps_nothing_more() -> None:
    core = make_core(num_blocks=6, num_host_blocks=1, preemption_mode="swap", lookahead=False)
    host = core.scheduler.state.kv.host
    host_id = host.store(b"hash", b"", b"tokens")
    assert host_id is not None
    host.pin(host_id)
    for index in range(2):
        core.add_request(make_request(f"r{index}", prompt=own_prompt(index, 9), max_tokens=9))
    while not (preempted := events_of([core.step()], Preempted)):
        pass
    assert (preempted[0].mode, preempted[0].num_tokens_kept) == ("recompute", 0)


@pytest.mark.parametrize("max_num_batched_tokens", [5, 16])
def test_only_what_had_been_computed_counts_as_computed_again(max_num_batched_tokens: int) -> None:
    core = make_core(num_blocks=7, enable_prefix_caching=False, max_num_batched_tokens=max_num_batched_tokens)
    core.add_requests([make_request(f"r{i}", prompt=own_prompt(i, 11), max_tokens=12) for i in range(3)])
    snapshot = EngineSnapshot(core.config)
    num_decodes = 0
    for result in run_to_end(core):
        snapshot.apply(result.record)
        num_decodes += sum(entry.is_decode for entry in result.record.batch)
    totals = snapshot.totals
    assert totals.num_preemptions > 0
    assert totals.num_recomputed_tokens == totals.num_tokens_lost
    num_needed = 3 * (11 + 12 - 1)  # the last token of an answer is never computed
    assert totals.num_prefill_tokens + num_decodes == num_needed + totals.num_recomputed_tokens
