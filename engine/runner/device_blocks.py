"""KV pool on a GPU, host tier in pinned memory: copies on a stream of their own. Imports torch."""

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

_PIECE_BYTES = 64 << 20
"""torch rounds pinned memory up to a power of two: in one piece, a tier of 20 GiB would take 32."""


class CopyStream(Protocol):
    """A queue of work on a device, beside the one that computes."""

    def use(self) -> AbstractContextManager[None]:
        """Let what is begun inside the block go to this stream."""
        ...

    def wait(self) -> None:
        """Return when all that was begun on it has ended."""
        ...


class CudaStream:
    """A `CopyStream` of CUDA."""

    def __init__(self, device: torch.device) -> None:
        """Make a stream."""
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own

    def use(self) -> AbstractContextManager[None]:
        """Let what is begun inside the block go to this stream."""
        context: AbstractContextManager[None] = torch.cuda.stream(self._stream)
        return context

    def wait(self) -> None:
        """Return when all that was begun on it has ended; other threads go on meanwhile."""
        self._stream.synchronize()


class DeviceBlocks:
    """A `BlockMemory`; each copy has ended on the device when its call returns.

    So the copying thread's order is the order on the device, too. The other half is the runner's: when a step
    returns, all that it has written is there.
    """

    def __init__(self, pool: Tensor, num_host_blocks: int, stream: CopyStream) -> None:
        """Take the pool, (blocks, ...) in any layout, and allocate as many host blocks."""
        self.num_blocks = len(pool)
        self.num_host_blocks = num_host_blocks
        self._pool = pool
        self._stream = stream
        block_bytes = pool[0].numel() * pool.itemsize if len(pool) else 1
        self._per_piece = max(1, _PIECE_BYTES // block_bytes)
        self._pieces = [
            torch.empty(
                (min(self._per_piece, num_host_blocks - first), *pool.shape[1:]),
                dtype=pool.dtype,
                pin_memory=pool.is_cuda,
            )  # (host blocks, ...)
            for first in range(0, num_host_blocks, self._per_piece)
        ]

    def host_block(self, host_id: int) -> Tensor:
        """Return a host block."""
        return self._pieces[host_id // self._per_piece][host_id % self._per_piece]

    def copy_out(self, block_id: int, host_id: int) -> None:
        """Copy a block to a host block."""
        self._copy(self.host_block(host_id), self._pool[block_id])

    def copy_in(self, host_id: int, block_id: int) -> None:
        """Copy a host block to a block."""
        self._copy(self._pool[block_id], self.host_block(host_id))

    def _copy(self, target: Tensor, source: Tensor) -> None:
        with torch.inference_mode(), self._stream.use():
            target.copy_(source, non_blocking=True)
            # Inside: a block that does not lie together goes through a temporary of this stream.
            self._stream.wait()
