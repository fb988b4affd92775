"""The compiled kernels for tests: compiled once for all of them, skipped where there is no compiler.

With PAGEGLASS_SANITIZE=1 they are compiled with AddressSanitizer: see `make sanitize`.
"""

import os
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from engine.errors import KernelsUnavailableError
from engine.kernels.cpu.build import build
from engine.kernels.cpu.instruction_sets import runnable
from engine.kernels.cpu.library import NativeLibrary, NativeModel, NativeSizes
from engine.kernels.cpu.pack import pack_model
from engine.model.check import ModelFiles
from engine.model.gguf import map_file
from engine.model.stored_numbers import to_float32, view_bytes
from engine.model.tensor_info import QUANT_GEOMETRY, TensorInfo


@cache
def open_library(isa: str | None = None) -> NativeLibrary:
    """Return the kernels for an instruction set (None: the best of this CPU); what does not compile fails."""
    present = runnable()
    if not present:
        pytest.skip("no kernels for this CPU")
    try:
        return NativeLibrary(build(isa or present[0], sanitize=os.environ.get("PAGEGLASS_SANITIZE") == "1"))
    except KernelsUnavailableError as error:
        if error.details:
            raise
        pytest.skip(str(error))


def make_sizes(
    *,
    dtype: str = "int8",
    kv_dtype: str = "bf16",
    num_blocks: int = 64,
    block_size: int = 8,
    num_positions: int = 256,
    num_threads: int = 1,
) -> NativeSizes:
    """Return sizes for a small model."""
    return NativeSizes(
        num_positions=num_positions,
        block_size=block_size,
        num_blocks=num_blocks,
        dtype=dtype,
        kv_dtype=kv_dtype,
        num_threads=num_threads,
    )


def load_native(files: ModelFiles, sizes: NativeSizes) -> NativeModel:
    """Return a model that is ready to step."""
    return pack_model(open_library(), files, sizes, lambda share: None)


def requantize(files: ModelFiles, types: dict[str, str], path: Path) -> ModelFiles:
    """Return a model with weights stored in other types.

    `types`: the type by the ends of names ("q.weight"); `path`: where their bytes are written.
    """
    content, weights = bytearray(), dict(files.weights)
    for name, tensor in files.weights.items():
        dtype = next((dtype for end, dtype in types.items() if name.endswith(end)), None)
        if dtype is None or tensor.shape[-1] % QUANT_GEOMETRY[dtype][0]:
            continue
        numbers = to_float32(tensor, view_bytes(tensor, map_file(tensor.path)))
        stored = quantize(np.ascontiguousarray(numbers), GGMLQuantizationType[dtype]).tobytes()
        weights[name] = TensorInfo(name, tensor.shape, dtype, path, len(content), len(stored))
        content += stored
    path.write_bytes(content)
    num_bytes = sum(tensor.num_bytes for tensor in weights.values())
    return replace(files, weights=weights, info=replace(files.info, num_bytes=num_bytes))
