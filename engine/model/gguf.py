"""GGUF files: header and tensor table, read with every bound checked before it is used.

A model file is input: no count, length, offset or product from it is trusted before it was compared
with the size of the file, in Python integers (which cannot overflow). Arrays stay in the file until
`GGUFArray.read`, so that reading the header allocates little however large its counts claim to be.
Weights are not read here; `engine.model.dequantize` does that. No torch.
"""

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from engine.errors import ModelError
from engine.model.tensor_info import QUANT_GEOMETRY, TensorInfo, check_no_overlap, show

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

MAX_ALIGNMENT = 1 << 20
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_NAME_BYTES = 1 << 10
MAX_KEY_BYTES = (1 << 16) - 1  # the format's own limit
MAX_STRING_BYTES = 1 << 26
MAX_DIMS = 4

GGML_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MIN_KEY_BYTES = 8 + 4 + 1  # empty key, type, one byte
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # empty name, count of dimensions, one of them, type, offset
_LENGTH_BYTES = 8

Scalar = int | float | bool | str


@dataclass(frozen=True, slots=True)
class GGUFArray:
    """An array in the metadata that is still in the file; its bounds were checked."""

    buffer: mmap.mmap = field(repr=False, compare=False)
    offset: int
    element_type: int
    count: int

    def read(self) -> list[Scalar]:
        """Return the elements. Raises `ModelError` where a string is not UTF-8."""
        if self.element_type == _STRING:
            return list(self._read_strings())
        code = f"<{self.count}{_SCALARS[self.element_type]}"
        return list(struct.unpack_from(code, self.buffer, self.offset))

    def _read_strings(self) -> Iterator[str]:
        at = self.offset
        for _ in range(self.count):
            (length,) = struct.unpack_from("<Q", self.buffer, at)
            at += _LENGTH_BYTES + length
            try:
                yield self.buffer[at - length : at].decode()
            except UnicodeDecodeError:
                raise ModelError(f"a string at byte {at - length} of the model file is not UTF-8.") from None


Value = Scalar | GGUFArray


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A checked header: `metadata` by key, `tensors` by name, `header_bytes` before the weights."""

    path: Path
    metadata: dict[str, Value]
    tensors: dict[str, TensorInfo]
    header_bytes: int


def read_gguf(path: Path) -> GGUFFile:
    """Read and check the header of a GGUF file.

    Raises `ModelError`, one line naming the file and the field, for anything that is not a whole and
    consistent GGUF file of version 2 or 3 in little-endian order.
    """
    return _Reader(path, map_file(path)).read()


def map_file(path: Path) -> mmap.mmap:
    """Map a file into memory; writes stay private, so the mapping may back a tensor."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except ValueError:
        raise ModelError(f"{path.name}: the file is empty.") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot read the model file ({error.strerror}).") from None


class _Reader:
    """A cursor over the mapped file; each read checks that its bytes are there."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.size = len(buffer)
        self.at = 0

    def read(self) -> GGUFFile:
        if self.buffer[:4] != MAGIC:
            raise self.error("magic", "this is not a GGUF file")
        self.at = 4
        version = self.take_int("I", "version")
        if version not in SUPPORTED_VERSIONS:
            raise self.error("version", f"{version} is not supported (2 and 3 in little-endian order are)")
        num_tensors = self.take_count("tensor count", MAX_TENSORS, _MIN_TENSOR_BYTES)
        num_keys = self.take_count("key count", MAX_KEYS, _MIN_KEY_BYTES)
        metadata = self.read_metadata(num_keys)
        alignment = self.check_alignment(metadata.get("general.alignment", DEFAULT_ALIGNMENT))
        entries = [self.read_tensor_entry(index) for index in range(num_tensors)]
        data_start = -(-self.at // alignment) * alignment
        tensors = {}
        for name, shape, dtype, offset in entries:
            if name in tensors:
                raise self.error(f"tensor {show(name)}", "appears twice")
            tensors[name] = self.place_tensor(name, shape, dtype, (data_start, offset, alignment))
        check_no_overlap(list(tensors.values()))
        return GGUFFile(self.path, metadata, tensors, min(data_start, self.size))

    def error(self, field_name: str, what: str) -> ModelError:
        return ModelError(f"{self.path.name}: {field_name}: {what}.")

    def skip(self, num_bytes: int, field_name: str) -> int:
        """Step over `num_bytes` that must exist; return where they begin."""
        start = self.at
        if num_bytes > self.size - start:
            raise self.error(
                field_name,
                f"needs {num_bytes} bytes at {start}, but the file ends at {self.size} (truncated?)",
            )
        self.at = start + num_bytes
        return start

    def take_scalar(self, code: str, field_name: str) -> Scalar:
        start = self.skip(struct.calcsize("<" + code), field_name)
        value: Scalar = struct.unpack_from("<" + code, self.buffer, start)[0]
        return value

    def take_int(self, code: str, field_name: str) -> int:
        return int(self.take_scalar(code, field_name))

    def take_count(self, field_name: str, limit: int, min_bytes: int) -> int:
        count = self.take_int("Q", field_name)
        if count > limit or count * min_bytes > self.size - self.at:
            raise self.error(field_name, f"{count} is more than the file can hold or than {limit}")
        return count

    def take_string(self, field_name: str, limit: int) -> str:
        length = self.take_int("Q", field_name + " length")
        if length > limit:
            raise self.error(field_name, f"a string of {length} bytes is longer than {limit}")
        start = self.skip(length, field_name)
        try:
            return self.buffer[start : self.at].decode()
        except UnicodeDecodeError:
            raise self.error(field_name, "is not UTF-8") from None

    def read_metadata(self, num_keys: int) -> dict[str, Value]:
        metadata: dict[str, Value] = {}
        for index in range(num_keys):
            key = self.take_string(f"key {index}", MAX_KEY_BYTES)
            if key in metadata:
                raise self.error(f"key {show(key)}", "appears twice")
            value_type = self.take_int("I", f"type of key {show(key)}")
            metadata[key] = self.read_value(value_type, f"value of key {show(key)}")
        return metadata

    def read_value(self, value_type: int, field_name: str) -> Value:
        if value_type in _SCALARS:
            return self.take_scalar(_SCALARS[value_type], field_name)
        if value_type == _STRING:
            return self.take_string(field_name, MAX_STRING_BYTES)
        if value_type == _ARRAY:
            return self.read_array(field_name)
        raise self.error(field_name, f"unknown value type {value_type}")

    def read_array(self, field_name: str) -> GGUFArray:
        element_type = self.take_int("I", field_name)
        count = self.take_int("Q", field_name)
        start = self.at
        if element_type in _SCALARS:
            self.skip(count * struct.calcsize("<" + _SCALARS[element_type]), field_name)
        elif element_type == _STRING:
            self.skip_strings(count, field_name)
        else:
            raise self.error(field_name, f"arrays of value type {element_type} are not supported")
        return GGUFArray(self.buffer, start, element_type, count)

    def skip_strings(self, count: int, field_name: str) -> None:
        # A tight loop: vocabularies have 10^5 strings, and the model check should take milliseconds.
        unpack_length = struct.Struct("<Q").unpack_from
        at, last = self.at, self.size - _LENGTH_BYTES
        if count * _LENGTH_BYTES > self.size - at:
            raise self.error(field_name, f"{count} strings are more than the file can hold")
        for _ in range(count):
            if at > last:
                raise self.error(field_name, f"the file ends inside it at {self.size} (truncated?)")
            at += _LENGTH_BYTES + unpack_length(self.buffer, at)[0]
        if at > self.size:
            raise self.error(field_name, f"the file ends inside it at {self.size} (truncated?)")
        self.at = at

    def check_alignment(self, alignment: Value) -> int:
        if not isinstance(alignment, int) or isinstance(alignment, bool):
            raise self.error("general.alignment", "is not an integer")
        if not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self.error("general.alignment", f"{alignment} is not a power of two up to {MAX_ALIGNMENT}")
        return alignment

    def read_tensor_entry(self, index: int) -> tuple[str, tuple[int, ...], str, int]:
        name = self.take_string(f"name of tensor {index}", MAX_NAME_BYTES)
        label = f"tensor {show(name)}"
        num_dims = self.take_int("I", f"{label} dimensions")
        if not 1 <= num_dims <= MAX_DIMS:
            raise self.error(f"{label} dimensions", f"{num_dims} is not 1 to {MAX_DIMS}")
        dims = tuple(self.take_int("Q", f"{label} dimensions") for _ in range(num_dims))
        type_id = self.take_int("I", f"{label} type")
        if type_id not in GGML_TYPES:
            raise self.error(f"{label} type", f"{type_id} is unknown")
        offset = self.take_int("Q", f"{label} offset")
        return name, dims[::-1], GGML_TYPES[type_id], offset

    def place_tensor(
        self, name: str, shape: tuple[int, ...], dtype: str, place: tuple[int, int, int]
    ) -> TensorInfo:
        """Check shape, size and position against the file. `place`: data start, offset, alignment."""
        data_start, offset, alignment = place
        label = f"tensor {show(name)}"
        per_block, block_bytes = QUANT_GEOMETRY[dtype]
        num_elements = math.prod(shape)
        if num_elements == 0 or shape[-1] % per_block:
            raise self.error(label, f"shape {list(shape)} does not fit type {dtype}")
        num_bytes = num_elements // per_block * block_bytes
        if offset % alignment:
            raise self.error(f"{label} offset", f"{offset} is not a multiple of {alignment}")
        if num_bytes > self.size or data_start + offset + num_bytes > self.size:
            raise self.error(
                label,
                f"needs {num_bytes} bytes at {data_start + offset}, but the file ends at {self.size} "
                "(truncated?)",
            )
        return TensorInfo(name, shape, dtype, self.path, data_start + offset, num_bytes)
