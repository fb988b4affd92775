"""What a device allows that kernels run on, and what all attention kernels take from it."""

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton
from triton.runtime import driver

IS_INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether Triton's interpreter computes, in numpy (`TRITON_INTERPRET=1`): for tests where there is no GPU."""

MIN_BLOCK = 16
"""The least size that a dimension of a product of tiles may have."""

_INTERPRETED_PROCESSORS = 4
_INTERPRETED_SHARED_MEMORY = 227 << 10


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Multiprocessors of a device, and the bytes of shared memory that one program may have."""

    num_processors: int
    shared_memory: int


@cache
def limits_of(device: torch.device) -> DeviceLimits:
    """Return the limits of a CUDA device; for the interpreter, those of a small Hopper."""
    if device.type != "cuda":
        return DeviceLimits(_INTERPRETED_PROCESSORS, _INTERPRETED_SHARED_MEMORY)
    # What Triton itself compares a kernel with before it launches it, which it does on the current device.
    properties = driver.active.utils.get_device_properties(driver.active.get_current_device())
    return DeviceLimits(properties["multiprocessor_count"], properties["max_shared_mem"])


def padded_size(size: int) -> int:
    """Return the size that a tile's dimension has for `size` numbers: a power of two, 16 at least."""
    return max(MIN_BLOCK, 1 << (size - 1).bit_length())


def score_scale(head_dim: int) -> float:
    """Return the factor of scores: the usual one, and kernels take powers of 2, which the hardware has."""
    return math.log2(math.e) / math.sqrt(head_dim)


def needs_upcast(dtype: torch.dtype) -> bool:
    """Return whether products of tiles must be computed in float32.

    The interpreter multiplies the bits of bfloat16 as if they were integers (seen in 3.6.0 and 3.9.0).
    """
    return IS_INTERPRETED and dtype == torch.bfloat16
