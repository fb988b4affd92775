"""Blocks reserved a step ahead of need: only spare ones, first to be taken back."""

from engine.records import BlockOpKind, FreeCause, StepResult
from engine.snapshot import EngineSnapshot
from engine.views import BlockState
from tests.builders import make_core, make_request, run_to_end, solo_output, tokens_of
from tests.support.scheduling import own_prompt


def count_ops(results: list[StepResult], kind: BlockOpKind, arg: int | None = None) -> int:
    ops = [op for result in results for op in result.record.block_ops]
    return sum(op.kind == kind and arg in (None, op.arg) for op in ops)


def test_the_next_block_is_reserved_in_the_step_that_fills_the_last_one() -> None:
    core = make_core(num_blocks=16)
    core.add_request(make_request(prompt=4, max_tokens=9))
    snapshot = EngineSnapshot(core.config)
    reserved = []
    results = []
    while core.has_work:
        results.append(core.step())
        snapshot.apply(results[-1].record)
        states = [
            snapshot.block(block_id).state for view in snapshot.running for block_id in view.block_table
        ]
        reserved.append(states.count(BlockState.RESERVED))
    assert reserved == [1, 0, 0, 0, 1, 0, 0, 0, 0]
    assert count_ops(results, BlockOpKind.LOOKAHEAD) == 2
    assert count_ops(results, BlockOpKind.FREE, FreeCause.UNUSED_LOOKAHEAD) == 0
    assert tokens_of(results)["r0"] == solo_output(make_request(prompt=4).prompt_token_ids, 9)


def test_no_block_is_reserved_for_a_token_that_will_never_come() -> None:
    core = make_core(num_blocks=16)
    core.add_request(make_request(prompt=4, max_tokens=1))
    core.add_request(make_request("r1", prompt=3, max_tokens=2))
    assert count_ops(run_to_end(core), BlockOpKind.LOOKAHEAD) == 0


def test_it_can_be_switched_off() -> None:
    core = make_core(num_blocks=16, lookahead=False)
    core.add_request(make_request(prompt=4, max_tokens=20))
    assert count_ops(run_to_end(core), BlockOpKind.LOOKAHEAD) == 0


def test_only_blank_blocks_above_the_watermark_are_reserved() -> None:
    core = make_core(num_blocks=4, watermark=0.5)
    core.add_request(make_request(prompt=4, max_tokens=9))
    core.step()
    assert core.scheduler.state.kv.pool.num_free == 2  # one was reserved, two are the watermark
    core = make_core(num_blocks=4)
    for name in ("a", "b"):
        core.add_request(make_request(name, prompt=own_prompt(ord(name) - 96, 12), max_tokens=2))
        results = run_to_end(core)
    assert count_ops(results, BlockOpKind.EVICT) > 0  # cached blocks are left, none is blank
    assert count_ops(results, BlockOpKind.LOOKAHEAD) == 0


def test_reserved_blocks_are_taken_back_newest_first_and_never_from_who_asks() -> None:
    core = make_core(num_blocks=16)
    core.add_requests([make_request(name, prompt=own_prompt(1, 4), max_tokens=9) for name in "abc"])
    results = [core.step()]
    state = core.scheduler.state
    held = list(state.lookahead)
    assert held == [1, 2, 3]
    state.take_back_lookahead(1)
    assert list(state.lookahead) == [1, 2]
    core.check_integrity()
    state.take_back_lookahead(5, keeper=state.lookahead[1])
    assert list(state.lookahead) == [1]
    core.check_integrity()
    results += run_to_end(core)
    assert set(map(tuple, tokens_of(results).values())) == {tuple(solo_output(own_prompt(1, 4), 9))}
    assert count_ops(results, BlockOpKind.FREE, FreeCause.UNUSED_LOOKAHEAD) == 2


def test_an_answer_that_ends_early_gives_its_reserved_block_back_unused() -> None:
    prompt = make_request(prompt=4).prompt_token_ids
    second = solo_output(prompt, 6)[4]
    core = make_core(num_blocks=16, eos_token_ids=frozenset({second}))
    core.add_request(make_request(prompt=prompt, max_tokens=20))
    results = [core.step() for _ in range(5)]
    assert not core.has_work
    assert count_ops(results, BlockOpKind.LOOKAHEAD) == 2
    assert count_ops(results, BlockOpKind.FREE, FreeCause.UNUSED_LOOKAHEAD) == 1


def test_an_abort_gives_a_reserved_block_back() -> None:
    core = make_core(num_blocks=16)
    core.add_request(make_request("again", prompt=4, max_tokens=20))
    core.step()
    core.abort("again")
    result = core.flush()
    assert result is not None
    assert count_ops([result], BlockOpKind.FREE, FreeCause.UNUSED_LOOKAHEAD) == 1
    assert result.record.num_used == 0


def test_who_needs_a_block_takes_one_back_that_was_reserved_ahead() -> None:
    core = make_core(num_blocks=6, num_host_blocks=8, load_steps=2, watermark=0.0, max_num_batched_tokens=24)
    prompts = {"loaded": own_prompt(1, 10), "other": own_prompt(3, 5), "gone": own_prompt(4, 3)}
    for name, prompt in (("before", own_prompt(1, 9)), ("evicts it", own_prompt(2, 23))):
        core.add_request(make_request(name, prompt=prompt, max_tokens=1))
        run_to_end(core)
    prompts["ahead"] = own_prompt(5, 3)
    core.add_requests([make_request(name, prompt=prompt, max_tokens=4) for name, prompt in prompts.items()])
    results = [core.step()]
    core.abort("gone")  # its block, blank, is reserved ahead of need; then the load ends
    results.append(core.step())
    assert [sequence.request_id for sequence in core.scheduler.state.lookahead.values()] == ["ahead"]
    assert core.scheduler.state.kv.pool.num_available == 0
    results.append(core.step())
    assert count_ops(results[2:], BlockOpKind.FREE, FreeCause.UNUSED_LOOKAHEAD) == 1
    assert "loaded" in {output.request_id for output in results[2].outputs}
    results += run_to_end(core)
    for name in ("loaded", "other", "ahead"):
        assert tokens_of(results)[name] == solo_output(prompts[name], 4)
