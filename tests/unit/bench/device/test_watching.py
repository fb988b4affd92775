import pytest

from bench.device.watching import Watchers, watched
from engine.records import StepRecord
from engine.snapshot import EngineSnapshot
from tests.builders import make_core, make_request

pytestmark = pytest.mark.unit


def make_records() -> tuple[list[StepRecord], EngineSnapshot]:
    core = make_core(num_blocks=64, max_model_len=256)
    core.add_requests([make_request("r0", prompt=20, max_tokens=200)])
    core.add_requests([make_request("r1", prompt=9, max_tokens=200)])
    records, snapshot = [], EngineSnapshot(core.config)
    while core.has_work:
        records.append(core.step().record)
        snapshot.apply(records[-1])
    return records, snapshot


def test_every_record_is_folded_and_shown_to_every_page() -> None:
    records, snapshot = make_records()
    core = make_core(num_blocks=64, max_model_len=256)
    watchers = Watchers(core.config, num_pages=3)
    watchers.start()
    for record in records:
        watchers.post(record)
    watchers.stop()
    assert watchers.hub.snapshot is not None
    assert watchers.hub.snapshot.to_dict() == snapshot.to_dict()
    assert watchers.num_messages >= 3
    assert watchers.num_bytes > 0


def test_records_that_do_not_follow_each_other_are_no_measurement() -> None:
    records, _ = make_records()
    config = make_core(num_blocks=64, max_model_len=256).config
    with pytest.raises(RuntimeError, match="did not add up"), watched(config, 0) as take:
        take(records[5])


def test_dropped_records_need_no_thread() -> None:
    records, _ = make_records()
    with watched(make_core().config, None) as take:
        for record in records:
            take(record)
