"""Stored numbers equal those of the format's own library."""

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from engine.errors import ModelError
from engine.model.dequantize import read_float32
from engine.model.tensor_info import NOT_LOADABLE, QUANT_GEOMETRY, TensorInfo

ROWS, COLUMNS = 6, 512
OFFSET = 3  # nothing promises alignment


def mapped(content: bytes) -> mmap.mmap:
    buffer = mmap.mmap(-1, len(content) + OFFSET)
    buffer[OFFSET:] = content
    return buffer


def place(dtype: str, num_bytes: int) -> TensorInfo:
    return TensorInfo("blk.0.x", (ROWS, COLUMNS), dtype, Path("model.gguf"), OFFSET, num_bytes)


def test_the_table_of_sizes_is_that_of_the_format() -> None:
    for name, sizes in QUANT_GEOMETRY.items():
        assert GGML_QUANT_SIZES[GGMLQuantizationType[name]] == sizes


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_numbers_read_as_the_library_reads_them(dtype: str) -> None:
    numbers = np.random.default_rng(1).normal(size=(ROWS, COLUMNS)).astype(np.float32)
    stored = quantize(numbers, GGMLQuantizationType[dtype])
    expected = dequantize(stored, GGMLQuantizationType[dtype]).reshape(ROWS, COLUMNS)
    content = stored.tobytes()
    read = read_float32(place(dtype, len(content)), mapped(content))
    assert read.dtype == torch.float32
    np.testing.assert_array_equal(read.numpy(), expected)


@pytest.mark.parametrize("dtype", sorted(set(QUANT_GEOMETRY) - NOT_LOADABLE))
def test_every_type_that_the_check_accepts_can_be_read(dtype: str) -> None:
    per_block, block_bytes = QUANT_GEOMETRY[dtype]
    num_bytes = ROWS * COLUMNS // per_block * block_bytes
    read = read_float32(place(dtype, num_bytes), mapped(bytes(num_bytes)))
    assert read.shape == (ROWS, COLUMNS)
    assert read.dtype == torch.float32


@pytest.mark.parametrize("dtype", ["I32", "Q8_1", "Q8_K"])
def test_other_types_are_refused_with_tensor_and_type(dtype: str) -> None:
    num_bytes = ROWS * COLUMNS // QUANT_GEOMETRY[dtype][0] * QUANT_GEOMETRY[dtype][1]
    with pytest.raises(ModelError, match=rf"blk\.0\.x.*{dtype}"):
        read_float32(place(dtype, num_bytes), mapped(bytes(num_bytes)))


def test_numbers_do_not_change_with_the_file(tmp_path: Path) -> None:
    buffer = mapped(np.ones((ROWS, COLUMNS), np.float32).tobytes())
    read = read_float32(place("F32", ROWS * COLUMNS * 4), buffer)
    buffer[OFFSET : OFFSET + 4] = b"\xff" * 4
    assert bool((read == 1).all())
