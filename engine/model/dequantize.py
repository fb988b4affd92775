"""Stored numbers to float32 tensors: the block formats of ggml, vectorised over all blocks of a tensor.

Formats and names: ggml's block layouts (32 numbers share a scale `d`, some also a minimum `m`; nibble i
of byte j is number j + 16 * i of its block).
"""

import mmap

import torch
from torch import Tensor

from engine.model.stored_numbers import unpack_with_library
from engine.model.tensor_info import QUANT_GEOMETRY, TensorInfo

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SCALE_BYTES = 2  # float16
_NIBBLE_BITS = 4
_NIBBLE_MASK = 0x0F
_NIBBLE_ZERO = 8  # Q4_0 stores q + 8


def read_float32(tensor: TensorInfo, buffer: mmap.mmap) -> Tensor:
    """Return a tensor's numbers as float32 in a fresh tensor of `tensor.shape`.

    `buffer` maps the whole file `tensor` lies in. Raises `ModelError` naming tensor and type if the
    type cannot be read.
    """
    raw = torch.frombuffer(
        buffer, dtype=torch.uint8, count=tensor.num_bytes, offset=tensor.offset
    )  # (num_bytes) uint8
    if tensor.dtype in _PLAIN:
        # A view needs alignment, which a safetensors header does not promise; the copy is aligned.
        plain = raw.clone().view(_PLAIN[tensor.dtype])  # (num_elements)
        return plain.to(torch.float32).view(tensor.shape)  # shape float32
    if tensor.dtype in _BLOCK_READERS:
        _, block_bytes = QUANT_GEOMETRY[tensor.dtype]
        blocks = raw.view(-1, block_bytes)  # (blocks, block_bytes) uint8
        return _BLOCK_READERS[tensor.dtype](blocks).view(tensor.shape)  # shape float32
    numbers = unpack_with_library(tensor, raw.numpy())  # (num_elements) float32
    return torch.from_numpy(numbers).view(tensor.shape)  # shape float32


def _scales(blocks: Tensor, at: int) -> Tensor:
    two_bytes = blocks[:, at : at + _SCALE_BYTES].contiguous()  # (blocks, 2) uint8
    return two_bytes.view(torch.float16).to(torch.float32)  # (blocks, 1) float32


def _nibbles(packed: Tensor) -> Tensor:
    halves = torch.stack((packed & _NIBBLE_MASK, packed >> _NIBBLE_BITS), dim=1)  # (blocks, 2, 16) uint8
    return halves.flatten(1).to(torch.float32)  # (blocks, 32) float32


def _read_q8_0(blocks: Tensor) -> Tensor:
    numbers = blocks[:, _SCALE_BYTES:].view(torch.int8).to(torch.float32)  # (blocks, 32) float32
    return numbers.mul_(_scales(blocks, 0))  # (blocks, 32) float32


def _read_q4_0(blocks: Tensor) -> Tensor:
    numbers = _nibbles(blocks[:, _SCALE_BYTES:]).sub_(_NIBBLE_ZERO)  # (blocks, 32) float32
    return numbers.mul_(_scales(blocks, 0))  # (blocks, 32) float32


def _read_q4_1(blocks: Tensor) -> Tensor:
    numbers = _nibbles(blocks[:, 2 * _SCALE_BYTES :])  # (blocks, 32) float32
    return numbers.mul_(_scales(blocks, 0)).add_(_scales(blocks, _SCALE_BYTES))  # (blocks, 32) float32


_BLOCK_READERS = {"Q8_0": _read_q8_0, "Q4_0": _read_q4_0, "Q4_1": _read_q4_1}
