"""Columns of whole numbers as bytes that compress well.

A column takes the fewest bytes a number that fit its largest one. Bytes of the same weight lie together
(all lowest ones, then all next ones, ...): the high ones are mostly zero and cost next to nothing once
they are compressed.
"""

import struct
import sys
from array import array
from collections.abc import Sequence

_HEADER = struct.Struct("<BBI")
_TYPE_OF_SIZE = {1: "B", 2: "H", 4: "I", 8: "Q"}
_SIGNED = 1
_MAX_OF_SIZE = ((0xFF, 1), (0xFFFF, 2), (0xFFFFFFFF, 4), (2**64 - 1, 8))


def pack_numbers(values: Sequence[int]) -> bytes:
    """Encode numbers: from 0 to 2**64 - 1, or from -2**63 to 2**63 - 1 if one of them is negative."""
    flags = 0
    if values and min(values) < 0:
        flags = _SIGNED
        values = [value << 1 if value >= 0 else ~(value << 1) for value in values]
    largest = max(values, default=0)
    size = next((size for limit, size in _MAX_OF_SIZE if largest <= limit), 0)
    if not size:
        raise OverflowError(f"{largest} does not fit into 8 bytes")
    data = _in_little_endian(array(_TYPE_OF_SIZE[size], values)).tobytes()
    planes = [data[weight::size] for weight in range(size)]
    return b"".join((_HEADER.pack(size, flags, len(values)), *planes))


def unpack_numbers(data: bytes) -> list[int]:
    """Decode what `pack_numbers` made; raises `ValueError` if it is something else."""
    if len(data) < _HEADER.size:
        raise ValueError("a column is cut short")
    size, flags, count = _HEADER.unpack_from(data)
    if size not in _TYPE_OF_SIZE or len(data) != _HEADER.size + size * count:
        raise ValueError("a column is damaged")
    mixed = bytearray(size * count)
    for weight in range(size):
        start = _HEADER.size + weight * count
        mixed[weight::size] = data[start : start + count]
    numbers = array(_TYPE_OF_SIZE[size])
    numbers.frombytes(mixed)
    values = _in_little_endian(numbers).tolist()
    if flags & _SIGNED:
        return [value >> 1 if not value & 1 else ~(value >> 1) for value in values]
    return values


def _in_little_endian(numbers: "array[int]") -> "array[int]":
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
