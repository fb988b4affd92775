import pytest
import torch

from bench.device.timed_device import ClockMoment, TimedDevice, idle_and_busy_ms
from tests.support.fake_device import FakeDevice

pytestmark = pytest.mark.unit


class At:
    """A moment at a known time."""

    def __init__(self, ms: float) -> None:
        self.ms = ms

    def record(self) -> None:
        raise AssertionError

    def elapsed_time(self, end: "At", /) -> float:
        return end.ms - self.ms


def test_idle_is_what_lies_between_spans_and_busy_what_lies_in_them() -> None:
    spans = [(At(0), At(4)), (At(5), At(6)), (At(6), At(9)), (At(12), At(13))]
    assert idle_and_busy_ms(spans) == (4, 9)  # type: ignore[arg-type]
    assert idle_and_busy_ms([]) == (0, 0)


def test_a_timed_device_does_what_the_device_does_and_takes_times_when_it_does_it() -> None:
    inner = FakeDevice()
    device = TimedDevice(inner)
    done: list[int] = []
    device.launch(lambda: done.append(1))
    device.is_on = True
    device.launch(lambda: done.append(2))
    device.launch(lambda: done.append(3))
    assert not done
    device.record().wait()
    assert done == [1, 2, 3]
    assert len(device.spans) == 2
    (first, end), (second, last) = device.spans
    assert isinstance(first, ClockMoment)
    assert 0 <= first.elapsed_time(end) <= first.elapsed_time(second) <= first.elapsed_time(last)
    idle_ms, busy_ms = idle_and_busy_ms(device.spans)
    assert idle_ms + busy_ms == pytest.approx(first.elapsed_time(last))
    device.free_unused()
    assert inner.num_frees == 1
    assert device.host_buffer(8).shape == (8,)
    graph, result = device.capture(lambda: torch.ones(2))
    graph.replay()
    assert result.tolist() == [1, 1]
