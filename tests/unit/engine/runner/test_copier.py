"""Copies beside the computing: in order, waited for only where a step would disturb them, never lost."""

import gc
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from engine.errors import EngineInvariantError
from engine.kv.loads import Load
from engine.runner import copier as copier_module
from engine.runner.copier import ArrayBlocks, BlockCopier
from engine.runner.copying_thread import CopyingThread
from engine.scheduling.output import ScheduledSequence, SchedulerOutput
from engine.sequence import Sequence
from tests.builders import make_request
from tests.support.copying import HeldMemory

BLOCK_SIZE = 4


class Bench:
    """A copier over a pool of eight blocks and four host blocks, each filled with its number."""

    def __init__(self) -> None:
        self.pool = np.arange(8, dtype=np.uint8)[:, None].repeat(6, 1)  # (blocks, bytes) uint8
        self.memory = HeldMemory(ArrayBlocks(self.pool, 4))
        self.copier = BlockCopier(self.memory, BLOCK_SIZE)

    def drain(self) -> None:
        """Return when all that is queued has been copied."""
        with self.copier._changed:
            assert self.copier._changed.wait_for(lambda: not self.copier._is_busy, 60)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.memory.release()


def make_load(load_id: int, pairs: list[tuple[int, int]]) -> Load:
    return Load(load_id, owner=1, slot=0, pairs=pairs, first_step=1)


def make_share(table: list[int], start: int, count: int) -> ScheduledSequence:
    sequence = Sequence(1, make_request(prompt=start + count), max_tokens=1)
    sequence.block_table = table
    return ScheduledSequence(sequence, start, count)


def in_thread(action: Callable[[], object]) -> "tuple[threading.Event, threading.Thread]":
    """Start an action; the event says that it has returned."""
    ended = threading.Event()

    def run() -> None:
        action()
        ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    return ended, thread


def test_copies_keep_the_order_in_which_they_were_asked_for(bench: Bench) -> None:
    bench.copier.begin(SchedulerOutput(swap_outs=[(5, 0), (6, 1)], loads=[make_load(1, [(0, 6), (1, 5)])]))
    bench.copier.begin(SchedulerOutput(swap_outs=[(6, 2)], loads=[make_load(2, [(2, 7)])]))
    assert bench.copier.finish([1, 2]) == [1, 2]
    assert bench.memory.made == [
        ("out", 5, 0), ("out", 6, 1), ("back", 0, 6), ("back", 1, 5), ("out", 6, 2), ("back", 2, 7),
    ]  # fmt: skip
    assert bench.pool[:, 0].tolist() == [0, 1, 2, 3, 4, 6, 5, 5]


@pytest.mark.parametrize(
    ("share", "has_to_wait"),
    [
        (make_share([3, 2], 6, 2), True),
        (make_share([2, 3], 0, 5), True),
        (make_share([1, 2, 3], 4, 5), True),
        (make_share([2, 3], 4, 1), False),  # reads block 2, writes block 3
        (make_share([3, 2], 0, 4), False),  # block 2 is reserved, not written yet
        (make_share([3, 4, 5], 0, 12), False),
    ],
)
def test_only_a_step_that_writes_a_block_waits_until_it_has_been_read(
    bench: Bench, share: ScheduledSequence, *, has_to_wait: bool
) -> None:
    bench.memory.hold("out")
    ended, thread = in_thread(lambda: bench.copier.begin(SchedulerOutput([share], swap_outs=[(2, 1)])))
    assert bench.memory.reached.wait(60)
    if not has_to_wait:
        assert ended.wait(60)
        assert bench.memory.made == []
    bench.memory.release()
    thread.join()
    assert bench.memory.made == [("out", 2, 1)] or not has_to_wait
    assert bench.copier.num_waits == has_to_wait


def test_a_block_is_still_unread_in_later_steps(bench: Bench) -> None:
    bench.memory.hold("out")
    bench.copier.begin(SchedulerOutput([make_share([0], 0, 1)], swap_outs=[(2, 1)]))
    bench.copier.begin(SchedulerOutput([make_share([0], 1, 1)]))
    ended, thread = in_thread(lambda: bench.copier.begin(SchedulerOutput([make_share([2], 0, 1)])))
    assert bench.memory.made == []
    assert not ended.is_set()
    bench.memory.release()
    thread.join()
    assert bench.memory.made == [("out", 2, 1)]
    bench.copier.begin(SchedulerOutput([make_share([2], 1, 1)]))
    assert bench.copier.num_waits == 1
    assert bench.copier._unread == {}


def test_a_load_is_reported_once_in_the_step_after_it_has_ended(bench: Bench) -> None:
    bench.memory.hold("back")
    bench.copier.begin(SchedulerOutput(loads=[make_load(1, [(0, 1), (1, 2)]), make_load(2, [(2, 3)])]))
    assert bench.copier.finish([]) == []
    assert bench.copier.finish([]) == []
    bench.memory.release()
    bench.drain()
    assert bench.copier.finish([]) == [1, 2]
    assert bench.copier.finish([]) == []


def test_waiting_for_a_load_does_not_wait_for_later_ones(bench: Bench) -> None:
    bench.copier.begin(SchedulerOutput(loads=[make_load(1, [(0, 1)])]))
    assert bench.copier.finish([1]) == [1]
    bench.memory.hold("back")
    bench.copier.begin(SchedulerOutput(loads=[make_load(2, [(0, 1)])]))
    assert bench.copier.finish([]) == []
    bench.memory.release()
    assert bench.copier.finish([2]) == [2]


def test_awaiting_what_is_not_under_way_is_a_bug_that_is_noticed(bench: Bench) -> None:
    with pytest.raises(EngineInvariantError, match="load 7"):
        bench.copier.finish([7])


@pytest.mark.parametrize(
    "output",
    [
        SchedulerOutput(swap_outs=[(0, 4)]),
        SchedulerOutput(swap_outs=[(8, 0)]),
        SchedulerOutput(loads=[make_load(1, [(4, 0)])]),
    ],
)
def test_a_copy_that_fails_fails_the_step_that_waits_and_all_later_ones_until_the_reset(
    bench: Bench, output: SchedulerOutput
) -> None:
    bench.copier.begin(output)
    bench.copier._num_queued += 1
    bench.copier._loads[9] = bench.copier._num_queued  # a copy behind the one that fails
    with pytest.raises(RuntimeError, match="host tier failed") as caught:
        bench.copier.finish([9])
    assert isinstance(caught.value.__cause__, IndexError)
    for call in (lambda: bench.copier.begin(SchedulerOutput()), lambda: bench.copier.finish([])):
        with pytest.raises(RuntimeError, match="host tier failed"):
            call()
    bench.copier.reset()
    bench.copier.begin(SchedulerOutput(swap_outs=[(3, 0)], loads=[make_load(1, [(0, 1)])]))
    assert bench.copier.finish([1]) == [1]
    assert bench.pool[1, 0] == 3


def test_a_failed_copy_ends_the_wait_of_a_step_that_would_write_its_source(bench: Bench) -> None:
    with pytest.raises(RuntimeError, match="host tier failed"):
        bench.copier.begin(SchedulerOutput([make_share([2], 0, 1)], swap_outs=[(2, 99)]))


def test_nothing_is_waited_for_without_end(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copier_module, "COPY_TIMEOUT_S", 0.0)
    bench.memory.hold("out")
    with pytest.raises(RuntimeError, match="has not ended within"):
        bench.copier.begin(SchedulerOutput([make_share([2], 0, 1)], swap_outs=[(2, 0)]))
    bench.copier.begin(SchedulerOutput(loads=[make_load(1, [(0, 1)])]))
    with pytest.raises(RuntimeError, match="has not ended within"):
        bench.copier.finish([1])
    with pytest.raises(RuntimeError, match="has not ended within"):
        bench.copier.reset()


def test_a_reset_waits_for_the_copy_under_way_and_drops_the_rest(bench: Bench) -> None:
    class Jobs(deque[Any]):
        """Releases the copy that is under way when the rest has been dropped."""

        def clear(self) -> None:
            super().clear()
            bench.memory.release()

    bench.copier._jobs = Jobs()
    bench.memory.hold("out")
    bench.copier.begin(SchedulerOutput(swap_outs=[(2, 0), (3, 1)], loads=[make_load(1, [(1, 5)])]))
    assert bench.memory.reached.wait(60)
    bench.copier.reset()
    assert bench.memory.made == [("out", 2, 0)]
    assert bench.copier.finish([]) == []
    bench.copier.begin(SchedulerOutput([make_share([3], 0, 1)], loads=[make_load(1, [(0, 5)])]))
    assert bench.copier.finish([1]) == [1]
    assert bench.pool[5, 0] == 2


def test_the_copying_thread_starts_with_the_first_copy_and_ends_with_the_copier() -> None:
    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("block-copier")]

    before = set(threads())
    bench = Bench()
    bench.copier.begin(SchedulerOutput([make_share([0], 0, 1)]))
    assert set(threads()) == before
    bench.copier.begin(SchedulerOutput(swap_outs=[(1, 1)]))
    [thread] = set(threads()) - before
    bench.drain()
    del bench
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_what_a_copy_takes_is_measured_for_any_size_of_pool_and_tier() -> None:
    for num_blocks, num_host_blocks in ((1, 1), (3, 20), (20, 3)):
        pool = np.zeros((num_blocks, 100), np.uint8)  # (blocks, bytes) uint8
        assert BlockCopier(ArrayBlocks(pool, num_host_blocks), BLOCK_SIZE).measure_ns() > 0


def test_blocks_that_do_not_lie_together_are_copied_whole() -> None:
    storage = np.random.default_rng(0).integers(0, 255, (3, 2, 8, 5), np.uint8)  # (layers, 2, blocks, bytes)
    before = storage.copy()
    memory = ArrayBlocks(np.moveaxis(storage, 2, 0), 2)
    memory.copy_out(4, 1)
    memory.copy_in(1, 6)
    assert (storage[:, :, 6] == before[:, :, 4]).all()
    others = [block for block in range(8) if block != 6]
    assert (storage[:, :, others] == before[:, :, others]).all()


def test_of_many_copies_each_is_made_and_each_load_reported_once(bench: Bench) -> None:
    finished: list[int] = []
    for load_id in range(1, 200):
        swap_outs, loads = [(load_id % 7, load_id % 4)], [make_load(load_id, [(load_id % 4, 7)])]
        bench.copier.begin(
            SchedulerOutput([make_share([load_id % 7], 0, 1)], swap_outs=swap_outs, loads=loads)
        )
        finished += bench.copier.finish([load_id] if load_id % 3 == 0 else [])
    finished += bench.copier.finish(list(bench.copier._loads))
    assert finished == list(range(1, 200))
    assert len(bench.memory.made) == 2 * 199


def test_a_thread_that_could_not_be_started_is_started_after_the_reset(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    output = SchedulerOutput(swap_outs=[(3, 0)], loads=[make_load(1, [(0, 1)])])
    with monkeypatch.context() as patch:
        patch.setattr(CopyingThread, "start", fail)
        with pytest.raises(RuntimeError, match="can't start"):
            bench.copier.begin(output)
    bench.copier.reset()
    bench.copier.begin(output)
    assert bench.copier.finish([1]) == [1]
    assert bench.pool[1, 0] == 3
