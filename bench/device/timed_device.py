"""A `Device` that knows when it was busy: an event before and after everything that is launched."""

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Protocol, cast

import torch
from torch import Tensor

from bench.device.timing import make_event
from engine.runner.device import Device, Event, Graph


class Moment(Protocol):
    """A point in a device's time."""

    def record(self) -> object:
        """Take the time when everything that was queued before is done."""
        ...

    def elapsed_time(self, end: "Moment", /) -> float:
        """Return the milliseconds from this to a later moment."""
        ...


class ClockMoment:
    """A `Moment` of the machine's clock, for what computes on it."""

    def __init__(self) -> None:
        """Not recorded."""
        self._s = 0.0

    def record(self) -> None:
        """Take the time."""
        self._s = time.perf_counter()

    def elapsed_time(self, end: Moment, /) -> float:
        """Return the milliseconds from this to a later moment."""
        assert isinstance(end, ClockMoment)
        return 1e3 * (end._s - self._s)  # noqa: SLF001 - of the same class


def make_moment(device: torch.device) -> Moment:
    """Return a moment of a device's time."""
    return ClockMoment() if device.type == "cpu" else cast("Moment", make_event())


class TimedDevice:
    """Passes everything on to a device; while `is_on`, notes from when to when each launch was worked on."""

    def __init__(self, device: Device, make: Callable[[torch.device], Moment] = make_moment) -> None:
        """Note nothing yet."""
        self.torch_device = device.torch_device
        self.is_on = False
        self.spans: list[tuple[Moment, Moment]] = []
        self._device = device
        self._make = make

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Return memory of the device's."""
        return self._device.host_buffer(num_bytes)

    def launch(self, work: Callable[[], None]) -> None:
        """Queue work between two moments."""
        if not self.is_on:
            self._device.launch(work)
            return
        start, end = self._make(self.torch_device), self._make(self.torch_device)
        self.spans.append((start, end))

        def timed() -> None:
            start.record()
            work()
            end.record()

        self._device.launch(timed)

    def record(self) -> Event:
        """Return the point behind all that is queued."""
        return self._device.record()

    def free_unused(self) -> None:
        """Give memory back that is kept for later."""
        self._device.free_unused()

    def capture(self, work: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        """Capture as the device does."""
        return self._device.capture(work)


def idle_and_busy_ms(spans: list[tuple[Moment, Moment]]) -> tuple[float, float]:
    """Return for how long the device had nothing to do between the first and the last span, and had.

    All of it must be done. A span counts as busy from its beginning: what the host still does before the
    first kernel in it is seen by a profiler only.
    """
    busy_ms = sum(start.elapsed_time(end) for start, end in spans)
    idle_ms = sum(max(0.0, end.elapsed_time(start)) for (_, end), (start, _) in pairwise(spans))
    return idle_ms, busy_ms
