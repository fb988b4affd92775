"""Whatever happens around it, a request's tokens are those it would get alone."""

import random

import pytest

from engine.records import Preempted
from engine.snapshot import EngineSnapshot
from tests.builders import VOCAB_SIZE, make_core, make_request, solo_output, tokens_of


@pytest.mark.parametrize("seed", range(24))
def test_output_equals_solo_run_under_eviction_pressure(seed: int) -> None:
    rng = random.Random(seed)
    num_blocks = rng.randrange(6, 20)
    core = make_core(
        num_blocks=num_blocks,
        block_size=rng.choice([1, 4, 16]) if num_blocks > 10 else 4,
        max_num_seqs=rng.randrange(2, 9),
        max_num_batched_tokens=rng.randrange(9, 40),
        max_model_len=48,
        enable_prefix_caching=seed % 6 != 0,
    )
    limit = core.config.max_model_len
    prefixes = [[rng.randrange(VOCAB_SIZE) for _ in range(limit // 2)] for _ in range(3)]
    prompts: dict[str, list[int]] = {}
    lengths: dict[str, int] = {}
    results = []
    snapshot = EngineSnapshot(core.config)
    aborted = set()
    while core.has_work or len(prompts) < 60:
        if len(prompts) < 60 and rng.random() < 0.4:
            name = f"q{len(prompts)}"
            prefix = rng.choice(prefixes)[: rng.randrange(1, limit // 2)]
            prompts[name] = [*prefix, rng.randrange(VOCAB_SIZE)]
            lengths[name] = rng.randrange(1, limit - len(prompts[name]) + 1)
            core.add_request(make_request(name, prompt=prompts[name], max_tokens=lengths[name]))
        if prompts and rng.random() < 0.03:
            name = rng.choice(list(prompts))
            aborted.add(name)
            core.abort(name)
        if core.has_work:
            results.append(core.step())
            snapshot.apply(results[-1].record)
            core.check_integrity()
        elif (flushed := core.flush()) is not None:
            results.append(flushed)
            snapshot.apply(flushed.record)
    tokens = tokens_of(results)
    for name, prompt in prompts.items():
        expected = solo_output(prompt, lengths[name])
        if name in aborted:
            assert tokens.get(name, []) == expected[: len(tokens.get(name, []))], f"seed {seed}, {name}"
        else:
            assert tokens[name] == expected, f"seed {seed}, {name}"
    assert core.scheduler.state.kv.pool.num_used == 0
    if seed in PRESSED_SEEDS:
        assert any(isinstance(event, Preempted) for result in results for event in result.record.events)
        assert snapshot.totals.num_hit_tokens > 0
        assert snapshot.totals.num_evictions > 0


PRESSED_SEEDS = {1, 2, 3, 4, 5}
"""Seeds whose runs preempt, hit and evict; checked, so that the test keeps testing what it says."""
