"""A GPU for tests of loading: tensors are on the CPU, memory is what the test says."""

import torch
from torch import Tensor

from engine.runner.copier import ArrayBlocks, BlockMemory
from tests.support.fake_device import FakeDevice


class FakeGpu:
    """A `Gpu` of `total_bytes`, of which `free` are free, and `held` less once something was measured.

    `peaks` are the results of measuring, in order.
    """

    torch_device = torch.device("cpu")

    def __init__(self, total_bytes: int, free: int, held: int, peaks: list[int]) -> None:
        self.total_bytes = total_bytes
        self.free_bytes = free
        self.device = FakeDevice()
        self._held = held
        self._peaks = list(peaks)
        self._has_begun = False
        self.num_measured = 0

    def begin_measuring(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self.free_bytes -= self._held

    def measure(self) -> int:
        self.num_measured += 1
        return self._peaks.pop(0)

    def make_device(self) -> FakeDevice:
        return self.device

    def make_blocks(self, storage: Tensor, num_host_blocks: int) -> BlockMemory:
        return ArrayBlocks(storage.movedim(2, 0).view(torch.uint8).numpy(), num_host_blocks)
