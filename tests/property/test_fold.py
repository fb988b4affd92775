"""The fold over the records is the engine's state, block by block, after every record."""

from typing import Any

import pytest

from engine.snapshot import EngineSnapshot
from tests.builders import folded_state, random_run, state_from_books


@pytest.mark.parametrize(
    ("seed", "num_steps", "overrides"),
    [
        (1, 2000, {}),
        (2, 500, {"block_size": 1, "num_blocks": 64}),
        (13, 500, {"enable_prefix_caching": False}),
        (4, 500, {"max_num_batched_tokens": 6}),
        (5, 500, {"num_blocks": 17, "watermark": 0.1}),
        (7, 2000, {"policy": "priority", "num_host_blocks": 40, "load_steps": 3, "policy_rate": 0.02}),
        (8, 1000, {"num_blocks": 17, "num_host_blocks": 6, "offload": False, "preemption_mode": "swap"}),
        (9, 500, {"enable_prefix_caching": False, "num_host_blocks": 40, "load_steps": 2}),
    ],
)
def test_fold_equals_books_after_every_record(seed: int, num_steps: int, overrides: dict[str, Any]) -> None:
    snapshot: EngineSnapshot | None = None
    for core, result in random_run(seed, num_steps, **overrides):
        snapshot = snapshot or EngineSnapshot(core.config)
        snapshot.apply(result.record)
        core.check_integrity()
        folded = folded_state(snapshot)
        assert folded == state_from_books(core), f"seed {seed}, step {result.record.step}"
        counts = folded["counts"]
        assert counts["free"] + counts["cached"] + counts["used"] == counts["total"]
    assert snapshot is not None
    totals = snapshot.totals
    assert totals.num_preemptions > 0
    assert totals.num_aborted > 0
    assert totals.num_rejected > 0
    if snapshot.config.enable_prefix_caching:
        assert totals.num_hit_tokens > 0
        assert totals.num_evictions > 0
    if snapshot.config.num_host_blocks:
        assert totals.num_swaps > 0
        assert totals.num_swapped_out > 0
        assert totals.num_loads >= totals.num_loads_hidden > 0
    assert totals.num_lookahead > 0 or snapshot.config.num_blocks < 20  # there is too little to spare
    assert totals.num_stalls == 0


def test_fold_survives_failed_steps() -> None:
    snapshot: EngineSnapshot | None = None
    for core, result in random_run(6, 500, fail_rate=0.02):
        snapshot = snapshot or EngineSnapshot(core.config)
        snapshot.apply(result.record)
        assert folded_state(snapshot) == state_from_books(core), f"step {result.record.step}"
    assert snapshot is not None
    assert snapshot.totals.num_resets > 0
    assert snapshot.totals.num_failed > 0
