"""Time on a device: from events in its queue, or from the clock where there is none."""

import statistics
import time
from collections.abc import Callable

import torch

WARM_UPS = 3
_LEAST_S = 2e-3
"""A sample of the clock should span many of its ticks, and the launch of many kernels."""


def wait_for(device: str) -> None:
    """Return when the device has done all that it was told."""
    if device != "cpu":
        torch.cuda.synchronize()


def measure_s(
    work: Callable[[], object], device: str, *, repeats: int = 10, warm_ups: int = WARM_UPS
) -> float:
    """Return the median seconds of one call of `work`, by events on a GPU; short ones are timed in groups."""
    for _ in range(warm_ups):
        work()
    once_s = _time_s(work, device, 1)
    group = max(1, min(1000, int(_LEAST_S / max(once_s, 1e-7))))
    return statistics.median(_time_s(work, device, group) for _ in range(repeats))


def _time_s(work: Callable[[], object], device: str, count: int) -> float:
    if device == "cpu":
        started = time.perf_counter()
        for _ in range(count):
            work()
        return (time.perf_counter() - started) / count
    first, last = make_event(), make_event()
    first.record()
    for _ in range(count):
        work()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3 / count


def make_event() -> torch.cuda.Event:
    """Return an event that knows its time."""
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own
    return event


def as_graph(work: Callable[[], object], device: str) -> Callable[[], object]:
    """Return what does the same without the interpreter between its kernels."""
    if device == "cpu":
        return work
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's own
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()  # what is compiled at first use must not be so while capturing
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay
