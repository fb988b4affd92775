"""What the machine can do now: `python -m bench.yardstick [--threads N]`, one JSON object.

Prints fp32 and bf16 matrix products in GFLOP/s and the bandwidth of a copy in GB/s (bytes read and written).
Every benchmark runs this before and after, in a process of its own: its memory and threads are not theirs.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import torch

MATMUL_SIZE = 1024
MATMULS_A_TIME = 5
COPY_FLOATS = 2**26
"""256 MiB: far more than any cache holds."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of each measurement")
    threads = parser.parse_args().threads
    torch.set_num_threads(threads)
    figures = {
        "fp32_gflops": _matmul_gflops(torch.float32),
        "bf16_gflops": _matmul_gflops(torch.bfloat16),
        "copy_gb_s": _copy_gb_s(),
        "threads": threads,
    }
    print(json.dumps(figures))


def _matmul_gflops(dtype: torch.dtype) -> float:
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE).to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def multiply() -> None:
        for _ in range(MATMULS_A_TIME):
            torch.mm(a, b, out=out)

    return MATMULS_A_TIME * 2 * MATMUL_SIZE**3 / _median_s(multiply) / 1e9


def _copy_gb_s() -> float:
    source, target = torch.ones(COPY_FLOATS), torch.zeros(COPY_FLOATS)
    return 2 * 4 * COPY_FLOATS / _median_s(lambda: target.copy_(source)) / 1e9


def _median_s(action: Callable[[], object], repeats: int = 7) -> float:
    action()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


if __name__ == "__main__":
    main()
