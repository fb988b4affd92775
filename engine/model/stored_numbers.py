"""Stored numbers as numpy arrays: the bytes as they lie in the file, or float32. No torch.

The block formats that are common enough to be worth it have quicker readers in `engine.model.dequantize`
(torch) and in the native kernels.
"""

import mmap
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelError
from engine.model.tensor_info import QUANT_GEOMETRY, TensorInfo, show

Bytes: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]

_BF16_SHIFT = 16  # a bfloat16 is the upper half of a float32


def view_bytes(tensor: TensorInfo, buffer: mmap.mmap) -> Bytes:
    """Return a tensor's bytes (num_bytes) uint8, not copied. `buffer` maps the whole file it lies in."""
    return np.frombuffer(buffer, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)


def to_float32(tensor: TensorInfo, raw: Bytes) -> Floats:
    """Return a tensor's bytes (num_bytes) as numbers of `tensor.shape`, in a fresh array.

    Raises `ModelError` naming tensor and type if the type cannot be read.
    """
    if tensor.dtype == "F32":
        numbers = raw.copy().view(np.float32)  # (num_elements); a view alone may lack alignment
    elif tensor.dtype == "F16":
        numbers = raw.copy().view(np.float16).astype(np.float32)  # (num_elements) float32
    elif tensor.dtype == "BF16":
        wide = raw.copy().view(np.uint16).astype(np.uint32) << _BF16_SHIFT  # (num_elements) uint32
        numbers = wide.view(np.float32)  # (num_elements) float32
    else:
        numbers = unpack_with_library(tensor, raw)  # (num_elements) float32
    return numbers.reshape(tensor.shape)


def unpack_with_library(tensor: TensorInfo, raw: Bytes) -> Floats:
    """Return the numbers (num_elements) of a block format, read by the format's own library."""
    # Imported here and not above: most files need none of it.
    from gguf import GGMLQuantizationType  # noqa: PLC0415
    from gguf.quants import dequantize  # noqa: PLC0415

    _, block_bytes = QUANT_GEOMETRY[tensor.dtype]
    try:
        quant_type = GGMLQuantizationType[tensor.dtype]
        numbers: NDArray[Any] = dequantize(raw.reshape(-1, block_bytes), quant_type)  # (blocks, per block)
    except (KeyError, NotImplementedError):
        raise ModelError(
            f"{tensor.path.name}: tensor {show(tensor.name)}: weights of type {tensor.dtype} are not "
            "supported."
        ) from None
    return np.ascontiguousarray(numbers, dtype=np.float32).reshape(-1)  # (num_elements) float32
