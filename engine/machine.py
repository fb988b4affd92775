"""What this machine has: cores, memory, and whether looking for a GPU is worth the seconds it takes."""

import os
from pathlib import Path

_GPU_SIGNS = (
    "/dev/nvidiactl", "/dev/nvidia0", "/proc/driver/nvidia", "/dev/nvhost-gpu", "/dev/dxg", "/dev/kfd"
)  # fmt: skip
"""One of these exists where torch may find a GPU."""


def usable_cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0))


def total_memory_bytes() -> int:
    """Return the machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def may_have_gpu() -> bool:
    """Whether there are signs of a GPU; whether it can be used, only torch knows."""
    return any(Path(path).exists() for path in _GPU_SIGNS)
