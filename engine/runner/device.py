"""What the CUDA runner needs of a device: one stream in order, events, graphs, memory that copies can use.

Everything goes through `launch`, so that a test can stand in for a GPU by doing it as late as a GPU might.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in the stream."""

    def wait(self) -> None:
        """Return when the device has come so far; other threads go on meanwhile."""
        ...


class Graph(Protocol):
    """Work that was captured once."""

    def replay(self) -> None:
        """Do it again, on what its tensors then hold; to be called inside of `launch`."""
        ...


class Device(Protocol):
    """A device that works through a queue beside the calling thread."""

    torch_device: torch.device

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Return host memory (num_bytes) uint8 that the device copies from and to by itself."""
        ...

    def launch(self, work: Callable[[], None]) -> None:
        """Queue work. It may be done at any time until an event behind it has been waited for."""
        ...

    def record(self) -> Event:
        """Return the point behind all that is queued."""
        ...

    def free_unused(self) -> None:
        """Give memory back that is kept for later."""
        ...

    def capture(self, work: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        """Do the work once, then capture it; return the graph and the tensor that each replay fills."""
        ...


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


class CudaDevice:
    """A `Device` that is a GPU; the current stream of the calling thread is the queue."""

    def __init__(self, device: torch.device) -> None:
        """Queue nothing."""
        self.torch_device = device
        self._pool = torch.cuda.graph_pool_handle()
        # One for all captures: libraries keep work space for each stream that they have seen.
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Return pinned memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def launch(self, work: Callable[[], None]) -> None:
        """Queue the kernels that `work` calls."""
        work()

    def record(self) -> Event:
        """Return the point behind all that is queued."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
        event.record(torch.cuda.current_stream(self.torch_device))
        return _CudaEvent(event)

    def free_unused(self) -> None:
        """Give memory back that torch keeps for later."""
        torch.cuda.empty_cache()

    def capture(self, work: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Do the work once on the way: what is compiled at first use must not be so while capturing."""
        self._side.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(self._side):
            work()
        torch.cuda.current_stream(self.torch_device).wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        # Graphs share memory: only one replays at a time, and what it gives is used before the next one.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"):
            result = work()
        return graph, result
