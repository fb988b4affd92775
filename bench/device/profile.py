"""Where a GPU's time goes, kernel by kernel, as torch's profiler sees it."""

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_KINDS = (
    ("attention", re.compile(r"paged|decode_kernel|prefill_kernel|_join|_merge|flash|fmha")),
    ("products", re.compile(r"gemm|nvjet|cutlass|cublas|splitk|gemv|xmma", re.IGNORECASE)),
    ("norms", re.compile(r"norm")),
    ("rotation and storing", re.compile(r"rope|rotate|rotary")),
    ("silu", re.compile(r"silu|gated")),
    ("copies", re.compile(r"memcpy|memset", re.IGNORECASE)),
)
_OTHER = "other (sampling, embedding, indices)"
_SHOWN = 25


def profile(work: Callable[[], object], num_steps: int) -> dict[str, Any]:
    """Return the device's time a step by kind of kernel and by name, and how long it had nothing to do.

    `work` computes that many steps. The profiler slows the host down, so idle time may be less without it.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return summarise(events, num_steps)


def summarise(events: Iterable[dict[str, Any]], num_steps: int) -> dict[str, Any]:
    """Return the figures of a trace in Chrome's format."""
    spans = [
        (float(event["ts"]), float(event["dur"]), str(event["name"]))
        for event in events
        if event.get("ph") == "X" and event.get("cat") in _ON_DEVICE
    ]
    if not spans:
        return {"error": "the profiler saw nothing on the device"}
    by_name: dict[str, list[float]] = defaultdict(list)
    for _, duration_us, name in spans:
        by_name[name].append(duration_us)
    by_kind: dict[str, float] = defaultdict(float)
    for name, durations_us in by_name.items():
        by_kind[kind_of(name)] += sum(durations_us) / num_steps
    idle_us, busy_us = _idle_and_busy((start, start + duration) for start, duration, _ in spans)
    order = sorted(by_name, key=lambda name: -sum(by_name[name]))
    return {
        "num_steps": num_steps,
        "busy_us": busy_us / num_steps,
        "idle_us": idle_us / num_steps,
        "idle_percent": 100 * idle_us / (idle_us + busy_us),
        "kernels": len(spans) / num_steps,
        "us_by_kind": dict(sorted(by_kind.items(), key=lambda item: -item[1])),
        "us_by_name": {name[:120]: sum(by_name[name]) / num_steps for name in order[:_SHOWN]},
    }


def kind_of(name: str) -> str:
    """Return what a kernel of that name computes."""
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), _OTHER)


def _idle_and_busy(spans: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return how long there was no span between the first and the last one, and how long there was one."""
    ordered = sorted(spans)
    busy, idle, until = 0.0, 0.0, ordered[0][0]
    for start, end in ordered:
        idle += max(0.0, start - until)
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return idle, busy
