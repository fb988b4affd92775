"""What the benchmark of the host tier reads from step records."""

import msgspec

from bench.prefetch import count_steps
from engine.records import (
    Admitted,
    BatchEntry,
    BlockOp,
    BlockOpKind,
    Event,
    FreeCause,
    Loaded,
    StepRecord,
)
from tests.builders import make_core, make_request

BATCH = [BatchEntry(1, 0, 4, 1, 7)]


def make_record(
    batch: list[BatchEntry], events: list[Event] | None = None, block_ops: list[BlockOp] | None = None
) -> StepRecord:
    core = make_core()
    core.add_request(make_request())
    record = core.step().record
    return msgspec.structs.replace(record, batch=batch, events=events or [], block_ops=block_ops or [])


def admit(num_host_tokens: int) -> Admitted:
    return Admitted(2, 1, 20, 0, resumed=False, num_host_tokens=num_host_tokens)


LOADED = Loaded(2, 1, 16, 1, 1, waited=False)


def test_steps_that_compute_beside_a_load_are_told_from_those_that_wait_for_it() -> None:
    counts = count_steps(
        [
            make_record(BATCH, [admit(0)]),
            make_record(BATCH, [admit(16)]),
            make_record(BATCH),
            make_record(BATCH, [LOADED]),
            make_record(BATCH),
            make_record([], [admit(16), LOADED]),
        ]
    )
    assert (counts["steps_beside_loads"], counts["steps_waited"]) == (3, 1)


def test_a_step_is_spared_if_a_block_that_was_reserved_before_it_is_still_there() -> None:
    def ahead(block_id: int) -> BlockOp:
        return BlockOp(BlockOpKind.LOOKAHEAD, block_id, 0)

    def give_back(block_id: int) -> BlockOp:
        return BlockOp(BlockOpKind.FREE, block_id, 0, FreeCause.UNUSED_LOOKAHEAD)

    counts = count_steps(
        [
            make_record(BATCH, block_ops=[ahead(1), ahead(2)]),
            make_record(BATCH, block_ops=[give_back(1)]),  # block 2 is used
            make_record(BATCH, block_ops=[ahead(3), BlockOp(BlockOpKind.ALLOCATE, 5, 0)]),
            make_record(BATCH, block_ops=[give_back(3)]),
            make_record(BATCH, block_ops=[ahead(4), give_back(4)]),
            make_record(BATCH),
        ]
    )
    assert counts["steps_spared"] == 1
