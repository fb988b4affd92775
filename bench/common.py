"""What all benchmarks share: the machine's yardstick, percentiles, tables, a server to measure."""

import platform
import statistics
import time
from collections.abc import Callable, Iterable

import torch

MATMUL_SIZE = 1024
COPY_FLOATS = 2**26


def percentile(values: Iterable[float], percent: float) -> float:
    """Return the percentile by linear interpolation."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def yardstick() -> str:
    """Measure the machine: fp32 matmul in GFLOP/s and copy bandwidth in GB/s (read + write)."""
    a, b = torch.randn(MATMUL_SIZE, MATMUL_SIZE), torch.randn(MATMUL_SIZE, MATMUL_SIZE)
    source = torch.ones(COPY_FLOATS)
    target = torch.zeros(COPY_FLOATS)
    matmul_s = _median_s(lambda: torch.mm(a, b))
    copy_s = _median_s(lambda: target.copy_(source))
    gflops = 2 * MATMUL_SIZE**3 / matmul_s / 1e9
    gigabytes = 2 * 4 * COPY_FLOATS / copy_s / 1e9
    threads = torch.get_num_threads()
    return f"yardstick: fp32 matmul {gflops:.0f} GFLOP/s, copy {gigabytes:.0f} GB/s, {threads} threads"


def _median_s(action: Callable[[], object], repeats: int = 9) -> float:
    action()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def versions() -> str:
    """Return the versions that matter for a figure."""
    return f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}"


def print_table(header: list[str], rows: list[list[object]]) -> None:
    """Print a Markdown table."""
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for row in rows:
        print(
            "| " + " | ".join(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row) + " |"
        )
