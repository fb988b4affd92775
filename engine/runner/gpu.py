"""A GPU as loading sees it: its memory, and the parts of a runner that are made for it.

A test stands in for one with tensors on the CPU.
"""

from typing import Protocol

import torch
from torch import Tensor

from engine.runner.copier import BlockMemory
from engine.runner.device import CudaDevice, Device
from engine.runner.device_blocks import CudaStream, DeviceBlocks


class Gpu(Protocol):
    """What loading needs of a GPU. Sizes are in bytes."""

    torch_device: torch.device

    @property
    def total_bytes(self) -> int:
        """All of its memory."""
        ...

    @property
    def free_bytes(self) -> int:
        """What nobody holds, this process included."""
        ...

    def begin_measuring(self) -> None:
        """Give back what torch keeps for later, and take what is held now as the beginning."""
        ...

    def measure(self) -> int:
        """Return the most that was held at a time since the beginning, beyond what was held then."""
        ...

    def make_device(self) -> Device:
        """Return the queue that a runner launches on."""
        ...

    def make_blocks(self, storage: Tensor, num_host_blocks: int) -> BlockMemory:
        """Return the KV pool and a new host tier; blocks lie in `storage` (layers, 2, blocks, ...)."""
        ...


class CudaGpu:
    """A `Gpu` of CUDA."""

    def __init__(self, torch_device: torch.device) -> None:
        """Take the device; makes its context, which takes memory of its own."""
        torch.zeros(1, device=torch_device)
        self.torch_device = torch_device
        self._held_bytes = 0

    @property
    def total_bytes(self) -> int:
        """All of its memory."""
        total_bytes: int = torch.cuda.mem_get_info(self.torch_device)[1]
        return total_bytes

    @property
    def free_bytes(self) -> int:
        """What nobody holds, this process included."""
        free_bytes: int = torch.cuda.mem_get_info(self.torch_device)[0]
        return free_bytes

    def begin_measuring(self) -> None:
        """Give back what torch keeps for later, and take what is held now as the beginning."""
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        self._held_bytes = torch.cuda.memory_reserved(self.torch_device)

    def measure(self) -> int:
        """Return the most that was held at a time since the beginning, beyond what was held then."""
        torch.cuda.synchronize(self.torch_device)
        # What was reserved, not what tensors took: the allocator's rounding takes memory, too.
        return torch.cuda.max_memory_reserved(self.torch_device) - self._held_bytes

    def make_device(self) -> Device:
        """Return the queue that a runner launches on."""
        return CudaDevice(self.torch_device)

    def make_blocks(self, storage: Tensor, num_host_blocks: int) -> BlockMemory:
        """Return the KV pool and a new host tier; blocks lie in `storage` (layers, 2, blocks, ...)."""
        pool = storage.movedim(2, 0)  # (blocks, layers, 2, ...)
        return DeviceBlocks(pool, num_host_blocks, CudaStream(storage.device))
