"""A snapshot that was written down and read again is the same, and goes on the same."""

import msgspec
import pytest

from engine.snapshot import EngineSnapshot
from engine.snapshot_data import SnapshotState
from tests.builders import random_run


def written_and_read(snapshot: EngineSnapshot) -> EngineSnapshot:
    data = msgspec.msgpack.encode(snapshot.export_state())
    return EngineSnapshot.from_state(snapshot.config, msgspec.msgpack.decode(data, type=SnapshotState))


@pytest.mark.parametrize(
    ("seed", "fail_rate", "overrides"),
    [
        (1, 0.0, {}),
        (2, 0.0, {"block_size": 1, "num_blocks": 64}),
        (3, 0.02, {}),
        (4, 0.0, {"enable_prefix_caching": False}),
    ],
)
def test_a_snapshot_survives_being_written_down_after_any_record(
    seed: int, fail_rate: float, overrides: dict[str, int]
) -> None:
    original: EngineSnapshot | None = None
    for core, result in random_run(seed, 400, fail_rate=fail_rate, **overrides):
        original = original or EngineSnapshot(core.config)
        copy = written_and_read(original)
        original.apply(result.record)
        copy.apply(result.record)
        assert copy.to_dict() == original.to_dict(), f"seed {seed}, step {result.record.step}"
        assert copy.waiting == original.waiting
    assert original is not None
    assert original.totals.num_preemptions > 0
    assert original.totals.num_resets > 0 or not fail_rate


def test_an_exported_state_does_not_move_with_the_snapshot() -> None:
    run = random_run(5, 200)
    core, result = next(run)
    snapshot = EngineSnapshot(core.config)
    snapshot.apply(result.record)
    for _, later in (next(run) for _ in range(60)):
        snapshot.apply(later.record)
    state, before = snapshot.export_state(), snapshot.to_dict()
    for _, later in run:
        snapshot.apply(later.record)
    assert snapshot.to_dict() != before
    assert EngineSnapshot.from_state(snapshot.config, state).to_dict() == before
