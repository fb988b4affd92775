"""A step's arrays on their way to the device: packed into one buffer, one copy a step."""

from collections.abc import Sequence as List

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.runner.device import Device, Event

_ALIGNMENT = 16
"""Kernels read aligned pointers in wider pieces; every array begins at such a place."""

_NUM_BUFFERS = 4
"""Host buffers in turn: a step uses up to two, while those of the step before may still be read."""

_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


class Staging:
    """One buffer on the device, filled from host buffers in turn.

    Where an array lies depends on the lengths of those before it only, so that a CUDA graph may be captured
    on the arrays of one upload and replayed on those of a later one of the same lengths.
    """

    def __init__(self, device: Device, num_bytes: int) -> None:
        """Make room for uploads of up to `num_bytes`, padding included."""
        self._device = device
        self._hosts = [device.host_buffer(num_bytes) for _ in range(_NUM_BUFFERS)]
        self._views = [host.numpy() for host in self._hosts]
        self._busy: list[Event | None] = [None] * _NUM_BUFFERS
        self._turn = 0
        self._target = torch.zeros(num_bytes, dtype=torch.uint8, device=device.torch_device)

    def upload(self, arrays: List[NDArray[np.generic]]) -> list[Tensor]:
        """Queue one copy of all arrays to the device; return them there, good until the next upload.

        Raises `ValueError` if they do not fit.
        """
        turn = self._turn
        self._turn = (turn + 1) % _NUM_BUFFERS
        busy = self._busy[turn]
        if busy is not None:
            busy.wait()
        host, tensors, end = self._views[turn], [], 0
        for array in arrays:
            start, end = end, end + array.nbytes
            if end > len(host):
                raise ValueError(f"a step of more than {len(host)} bytes")
            host[start:end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            tensors.append(self._target[start:end].view(_DTYPES[array.dtype]).view(array.shape))
            end += -end % _ALIGNMENT
        source, target = self._hosts[turn][:end], self._target[:end]
        self._device.launch(lambda: _copy(target, source))
        self._busy[turn] = self._device.record()
        return tensors


def padded_bytes(num_bytes: int) -> int:
    """Return how much of an upload an array takes."""
    return num_bytes + -num_bytes % _ALIGNMENT


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)
