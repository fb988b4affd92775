"""Blocks of sequences, loads from the host tier, and what a step costs: nothing that grows with the pool."""

from collections import Counter, OrderedDict
from typing import Any

import pytest

from engine.core import EngineCore
from engine.kv.block_pool import KVCacheBlock
from engine.kv.cache_manager import KVCacheManager
from engine.kv.loads import LOAD_DEADLINE_STEPS
from engine.records import Admitted, BlockOpKind, FreeCause, Loaded, Preempted, StepResult
from engine.sequence import Sequence, SequenceStatus
from tests.builders import make_core, make_request, run_to_end, solo_output, tokens_of
from tests.support.scheduling import events_of, own_prompt


def computed(kv: KVCacheManager, prompt: list[int], seq_id: int = 1) -> Sequence:
    """Return a sequence that holds blocks for its prompt, all of it computed."""
    sequence = Sequence(seq_id, make_request(str(seq_id), prompt=prompt), 4)
    sequence.slot = seq_id
    hits = kv.get_computed_blocks(sequence)
    kv.admit(sequence, hits, [], len(prompt))
    sequence.status = SequenceStatus.RUNNING
    sequence.num_computed_tokens = len(prompt)
    kv.publish_full_blocks(sequence, len(hits) * kv.block_size)
    return sequence


def test_blocks_needed_count_whole_blocks_and_what_is_held() -> None:
    kv = KVCacheManager(8, 4)
    sequence = computed(kv, list(range(6)))
    assert [kv.num_blocks_needed(sequence, count) for count in (5, 8, 9, 12, 13)] == [0, 0, 1, 1, 2]


def test_idle_hits_are_not_counted_as_room() -> None:
    kv = KVCacheManager(4, 4)
    first = computed(kv, list(range(12)))
    kv.free(first, FreeCause.FINISHED)
    second = Sequence(2, make_request("2", prompt=list(range(12))), 4)
    hits = kv.get_computed_blocks(second)
    assert len(hits) == 2  # the last token is computed again
    assert [kv.num_missing(hits, num_tokens, 0) for num_tokens in (12, 16, 17)] == [0, 0, 1]
    assert kv.num_missing(hits, 12, 2) == 1


def test_growing_takes_all_or_nothing() -> None:
    kv = KVCacheManager(4, 4)
    sequence = computed(kv, list(range(8)))
    assert not kv.try_grow(sequence, 17)
    assert len(sequence.block_table) == 2
    assert kv.try_grow(sequence, 16)
    assert kv.pool.num_available == 0


def test_swapping_keeps_as_many_leading_blocks_as_the_host_tier_takes() -> None:
    kv = KVCacheManager(8, 4, num_host_blocks=2)
    sequence = computed(kv, list(range(14)))
    assert kv.swap_out(sequence) == 2
    assert kv.swap_outs == [(sequence.block_table[0], 0), (sequence.block_table[1], 1)]
    kv.free(sequence, FreeCause.PREEMPTED)
    assert (kv.host.num_pinned, kv.pool.num_used) == (2, 0)
    kv.release_pins(sequence)
    assert (kv.host.num_pinned, kv.host.num_used) == (0, 2)


def test_a_shared_prefix_is_copied_to_the_host_tier_once() -> None:
    kv = KVCacheManager(16, 4, num_host_blocks=8)
    first, second = (computed(kv, [*range(8), seq_id, 9, 9], seq_id) for seq_id in (20, 21))
    assert (kv.swap_out(first), kv.swap_out(second)) == (2, 2)
    assert len(kv.swap_outs) == 2
    assert kv.host.num_pinned == 2
    kv.release_pins(first)
    assert kv.host.num_pinned == 2


def test_an_evicted_prefix_goes_to_the_host_tier_and_comes_back_on_a_hit() -> None:
    core = make_core(num_blocks=4, num_host_blocks=8)
    prompt = own_prompt(1, 9)
    for name, tokens in (("a", prompt), ("b", own_prompt(2, 15)), ("again", prompt)):
        core.add_request(make_request(name, prompt=tokens, max_tokens=1))
        results = run_to_end(core)
        assert tokens_of(results)[name] == solo_output(tokens, 1)
    (admitted,) = events_of(results, Admitted)
    assert (admitted.num_cached_tokens, admitted.num_host_tokens, admitted.miss) == (0, 8, None)
    (loaded,) = events_of(results, Loaded)
    assert (loaded.num_tokens, loaded.num_blocks, loaded.num_steps, loaded.waited) == (8, 2, 1, True)


def test_without_offload_evicted_prefixes_are_gone() -> None:
    core = make_core(num_blocks=4, num_host_blocks=8, offload=False)
    for name, number, length in (("a", 1, 9), ("b", 2, 15), ("again", 1, 9)):
        core.add_request(make_request(name, prompt=own_prompt(number, length), max_tokens=1))
        results = run_to_end(core)
    assert events_of(results, Admitted)[0].num_host_tokens == 0
    assert core.scheduler.state.kv.host.num_used == 0


def run_beside_a_load(load_steps: int, num_tokens: int) -> list[StepResult]:
    """Let "again" come back from the host tier while "other" generates tokens."""
    core = make_core(num_blocks=30, max_model_len=120, num_host_blocks=8, load_steps=load_steps)
    core.add_request(make_request("a", prompt=own_prompt(1, 9), max_tokens=1))
    run_to_end(core)
    core.add_request(make_request("b", prompt=[500 + i for i in range(119)], max_tokens=1))
    run_to_end(core)
    core.add_request(make_request("other", prompt=own_prompt(3, 3), max_tokens=num_tokens))
    core.step()
    core.add_request(make_request("again", prompt=own_prompt(1, 9), max_tokens=2))
    results = run_to_end(core)
    assert tokens_of(results)["again"] == solo_output(own_prompt(1, 9), 2)
    return results


def test_a_load_hides_behind_what_the_others_compute() -> None:
    (loaded,) = events_of(run_beside_a_load(load_steps=5, num_tokens=30), Loaded)
    assert (loaded.num_steps, loaded.waited) == (5, False)


def test_a_load_that_nothing_hides_is_waited_for() -> None:
    (loaded,) = events_of(run_beside_a_load(load_steps=20, num_tokens=5), Loaded)
    assert loaded.waited
    assert loaded.num_steps < 10


def test_an_overdue_load_is_waited_for_whatever_else_there_is_to_do() -> None:
    results = run_beside_a_load(load_steps=1000, num_tokens=100)
    (loaded,) = events_of(results, Loaded)
    assert (loaded.num_steps, loaded.waited) == (LOAD_DEADLINE_STEPS + 1, True)
    assert [result.record.batch for result in results if loaded in result.record.events] != [[]]


# ---------------------------------------------------------------------- cost


class CountedList(list[KVCacheBlock]):
    """Counts what is asked of it."""

    counts: Counter[str]

    def __getitem__(self, index: Any) -> Any:
        self.counts["block"] += 1
        return super().__getitem__(index)

    def __iter__(self) -> Any:
        self.counts["all blocks"] += 1
        return super().__iter__()


class CountedDict(OrderedDict[int, None]):
    """Counts what is asked of it."""

    counts: Counter[str]

    def __iter__(self) -> Any:
        self.counts["all free"] += 1
        return super().__iter__()

    def __contains__(self, key: object) -> bool:
        self.counts["look up"] += 1
        return super().__contains__(key)

    def __setitem__(self, key: int, value: None) -> None:
        if hasattr(self, "counts"):
            self.counts["free"] += 1
        super().__setitem__(key, value)

    def popitem(self, last: bool = True) -> Any:
        self.counts["take"] += 1
        return super().popitem(last=last)


def count_operations(num_blocks: int) -> tuple[Counter[str], list[StepResult]]:
    """Run the same requests, with hits, lookahead and aborts, on a pool of any size."""
    core: EngineCore = make_core(num_blocks=num_blocks, max_model_len=64, watermark=0.0, num_host_blocks=20)
    pool, counts = core.scheduler.state.kv.pool, Counter[str]()
    pool.blocks = CountedList(pool.blocks)
    pool._free = CountedDict(pool._free)
    pool.blocks.counts = pool._free.counts = counts
    for number in range(12):
        core.add_request(make_request(f"r{number}", prompt=own_prompt(number % 3, 20 + number), max_tokens=9))
    results = [core.step() for _ in range(10)]
    core.abort("r3")
    while core.has_work:
        results.append(core.step())
    return counts, results


def test_a_step_costs_the_same_on_a_pool_a_hundred_times_as_large() -> None:
    small, small_results = count_operations(1_000)
    large, large_results = count_operations(100_000)
    assert small == large
    assert small["take"] > 50
    assert not {"all blocks", "all free"} & set(large)
    assert tokens_of(small_results) == tokens_of(large_results)
    kinds = {op.kind for result in large_results for op in result.record.block_ops}
    assert {BlockOpKind.HIT, BlockOpKind.LOOKAHEAD, BlockOpKind.STORE, BlockOpKind.FREE} <= kinds


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_a_swapped_sequence_computes_its_last_block_again_and_no_more(enable_prefix_caching: bool) -> None:
    core = make_core(
        num_blocks=6,
        num_host_blocks=20,
        preemption_mode="swap",
        enable_prefix_caching=enable_prefix_caching,
        offload=False,
    )
    requests = [make_request(name, prompt=own_prompt(i, 9), max_tokens=8) for i, name in enumerate("ab")]
    core.add_requests(requests)
    results = run_to_end(core)
    (preempted,) = events_of(results, Preempted)
    assert (preempted.mode, preempted.num_tokens_kept % 4, preempted.num_tokens_lost < 4) == ("swap", 0, True)
    resumed = next(event for event in events_of(results, Admitted) if event.resumed)
    assert resumed.num_cached_tokens + resumed.num_host_tokens == preempted.num_tokens_kept
    for request in requests:
        assert tokens_of(results)[request.request_id] == solo_output(request.prompt_token_ids, 8)
    assert core.scheduler.state.kv.host.num_pinned == 0
