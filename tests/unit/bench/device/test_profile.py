from typing import Any

import pytest

from bench.device import breakdown
from bench.device.profile import kind_of, summarise
from tests.builders import make_core

pytestmark = pytest.mark.unit


def kernel(name: str, start_us: float, duration_us: float, category: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start_us, "dur": duration_us}


def test_time_is_summed_by_kind_and_idle_time_is_where_no_stream_works() -> None:
    events = [
        kernel("_decode_kernel", 100, 40),
        kernel("Memcpy HtoD", 120, 10, "gpu_memcpy"),  # beside it, on another stream
        kernel("nvjet_tst_64x8", 150, 30),
        kernel("nvjet_tst_64x8", 180, 20),
        kernel("aten::mm", 0, 1000, "cpu_op"),
        {"ph": "i", "cat": "kernel", "name": "mark"},
    ]
    figures = summarise(events, 2)
    assert (figures["busy_us"], figures["idle_us"]) == (45, 5)
    assert figures["idle_percent"] == 10
    assert figures["kernels"] == 2
    assert figures["us_by_kind"] == {"products": 25, "attention": 20, "copies": 5}
    assert figures["us_by_name"]["nvjet_tst_64x8"] == 25


def test_a_trace_without_a_device_says_so() -> None:
    assert summarise([kernel("aten::mm", 0, 5, "cpu_op")], 1) == {
        "error": "the profiler saw nothing on the device"
    }


@pytest.mark.parametrize(("name", "kind"), [
    ("_prefill_kernel", "attention"), ("_rms_norm_kernel", "norms"),
    ("_rotate_and_store_kernel", "rotation and storing"),
    ("_silu_mul_kernel", "silu"), ("void cutlass::Kernel2<...>", "products"),
    ("at::native::reduce_kernel<ArgMax>", "other (sampling, embedding, indices)"),
])  # fmt: skip
def test_kernels_have_a_kind(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_a_machine_without_a_profiler_is_measured_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> dict[str, Any]:
        raise AssertionError("No activities specified for the profiler")

    monkeypatch.setattr(breakdown, "profile", fail)
    core = make_core()
    assert breakdown._try_profile(core, 3) == {
        "error": "AssertionError: No activities specified for the profiler"
    }
