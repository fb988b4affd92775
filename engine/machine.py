"""What this machine has: cores, memory, and whether looking for a GPU is worth the seconds it takes."""

import os
from dataclasses import dataclass
from pathlib import Path

_GPU_SIGNS = (
    "/dev/nvidiactl", "/dev/nvidia0", "/proc/driver/nvidia", "/dev/nvhost-gpu", "/dev/dxg", "/dev/kfd"
)  # fmt: skip
"""One of these exists where torch may find a GPU."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """What torch finds here.

    `count` GPUs that it can use; `capability` is the least compute capability of those wanted, like (9, 0).
    `obstacle` says, where there is none, why torch cannot use what seems to be there.
    """

    count: int = 0
    capability: tuple[int, int] = (0, 0)
    obstacle: str | None = None


def usable_cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0))


def total_memory_bytes() -> int:
    """Return the machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def may_have_gpu() -> bool:
    """Whether there are signs of a GPU; whether it can be used, only torch knows."""
    return any(Path(path).exists() for path in _GPU_SIGNS)


def is_triton_interpreted() -> bool:
    """Whether Triton kernels are to be computed by their interpreter, on the CPU (slow, for tests)."""
    return os.environ.get("TRITON_INTERPRET") == "1"
