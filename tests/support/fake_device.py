"""A device in the place of a GPU: does what it is told as late as it may, on the CPU."""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor


class FakeEvent:
    def __init__(self, device: "FakeDevice", number: int) -> None:
        self._device = device
        self._number = number

    def wait(self) -> None:
        self._device.work_until(self._number)


class FakeGraph:
    """Replays by computing again, into the tensor that the capture gave."""

    def __init__(self, work: Callable[[], Tensor], result: Tensor) -> None:
        self._work = work
        self._result = result
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        self._result.copy_(self._work())


class FakeDevice:
    """A `Device` that works off its queue only when an event is waited for, or else at once (`is_quick`).

    So host memory that is written too early, results that are read too early or overwritten, and work in the
    wrong order all show in one of both.
    """

    torch_device = torch.device("cpu")

    def __init__(self, *, is_quick: bool = False) -> None:
        self._is_quick = is_quick
        self._queue: deque[Callable[[], None]] = deque()
        self._num_queued = 0
        self._num_done = 0
        self.graphs: list[FakeGraph] = []
        self.num_frees = 0

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def launch(self, work: Callable[[], None]) -> None:
        self._queue.append(work)
        self._num_queued += 1
        if self._is_quick:
            self.work_until(self._num_queued)

    def record(self) -> FakeEvent:
        return FakeEvent(self, self._num_queued)

    def free_unused(self) -> None:
        self.num_frees += 1

    def capture(self, work: Callable[[], Tensor]) -> tuple[FakeGraph, Tensor]:
        result = work()
        self.graphs.append(FakeGraph(work, result))
        return self.graphs[-1], result

    @property
    def is_idle(self) -> bool:
        return not self._queue

    def work_until(self, number: int) -> None:
        """Do what was queued before, as far as it is not done."""
        while self._num_done < number:
            work = self._queue.popleft()
            self._num_done += 1
            with torch.inference_mode():
                work()
