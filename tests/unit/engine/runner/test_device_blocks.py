"""Copies to and from a device's memory: whole, on their own stream, ended when the call returns."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from engine.kv.loads import Load
from engine.runner.copier import BlockCopier
from engine.runner.device_blocks import DeviceBlocks
from engine.scheduling.output import SchedulerOutput


class FakeStream:
    """Notes what is done; `is_used` while work goes to it."""

    def __init__(self) -> None:
        self.is_used = False
        self.waits: list[bool] = []

    @contextmanager
    def use(self) -> Iterator[None]:
        self.is_used = True
        yield
        self.is_used = False

    def wait(self) -> None:
        self.waits.append(self.is_used)


def make_storage() -> torch.Tensor:
    return torch.arange(3 * 2 * 8 * 5, dtype=torch.float32).view(3, 2, 8, 5)  # (layers, 2, blocks, numbers)


def test_blocks_are_copied_whole_and_each_copy_waits_for_its_stream() -> None:
    storage, before, stream = make_storage(), make_storage(), FakeStream()
    memory = DeviceBlocks(storage.movedim(2, 0), 4, stream)
    memory.copy_out(5, 3)
    memory.copy_in(3, 2)
    assert stream.waits == [True, True]
    assert torch.equal(storage[:, :, 2], before[:, :, 5])
    others = [block for block in range(8) if block != 2]
    assert torch.equal(storage[:, :, others], before[:, :, others])
    assert (memory.num_blocks, memory.num_host_blocks) == (8, 4)


def test_the_copying_thread_may_write_a_pool_that_was_made_for_inference() -> None:
    with torch.inference_mode():
        pool = torch.zeros(4, 5)  # (blocks, numbers)
        pool[1] = 7
    copier = BlockCopier(DeviceBlocks(pool, 1, FakeStream()), 16)
    load = Load(1, owner=1, slot=0, pairs=[(0, 3)], first_step=1)
    copier.begin(SchedulerOutput(swap_outs=[(1, 0)], loads=[load]))
    assert copier.finish([1]) == [1]
    np.testing.assert_array_equal(pool[3].numpy(), np.full(5, 7, np.float32))


@pytest.mark.parametrize("blocks", [(8, 0), (0, 4)])
def test_blocks_that_are_not_there_are_refused(blocks: tuple[int, int]) -> None:
    memory = DeviceBlocks(make_storage().movedim(2, 0), 4, FakeStream())
    with pytest.raises(IndexError):
        memory.copy_out(*blocks)
