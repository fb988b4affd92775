"""Hugging Face model folders: `config.json` and safetensors, with bounds checked (no torch here).

Only data is read: no pickle (`*.bin` is never opened) and no code from the folder.
"""

import json
import math
import re
from pathlib import Path
from typing import Any, TypeGuard

from engine.errors import ModelError
from engine.model.tensor_info import TensorInfo, check_no_overlap, show

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

MAX_JSON_BYTES = 1 << 26
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMS = 8
MAX_DIM = 1 << 48
MAX_FILES = 4096

_LENGTH_BYTES = 8
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
_DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "U16": 2, "U32": 4, "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of the model folder; raises `ModelError`."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(f"{path.name}: larger than {MAX_JSON_BYTES} bytes.")
        data = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: cannot read it ({error.strerror}).") from None
    return _parse_object(data, path.name)


def read_tensors(folder: Path) -> dict[str, TensorInfo]:
    """Return all tensors of a folder by name, with places checked against their files.

    With an index only the files it names count, and each tensor must be in the file the index says.
    """
    index = folder / INDEX_FILE
    if not index.exists():
        return _merge([read_safetensors_header(path) for path in _find_files(folder)])
    placed = _read_index(index)
    names = sorted(set(placed.values()))
    tensors = _merge([read_safetensors_header(folder / name) for name in names])
    for tensor_name, file_name in placed.items():
        if tensor_name not in tensors or tensors[tensor_name].path.name != file_name:
            raise ModelError(f"{file_name}: tensor {show(tensor_name)} of {INDEX_FILE} is not in it.")
    return tensors


def read_safetensors_header(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of one safetensors file by name; raises `ModelError`."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > min(MAX_HEADER_BYTES, size - _LENGTH_BYTES):
                raise ModelError(f"{path.name}: header length: {length} bytes do not fit (truncated?).")
            header = _parse_object(file.read(length), path.name)
    except OSError as error:
        raise ModelError(f"{path}: cannot read the model file ({error.strerror}).") from None
    header.pop("__metadata__", None)
    start = _LENGTH_BYTES + length
    tensors = {name: _read_entry(path, name, entry, (start, size)) for name, entry in header.items()}
    check_no_overlap(list(tensors.values()))
    return tensors


def _parse_object(data: bytes, file_name: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise ModelError(f"{file_name}: the JSON in it is broken (truncated?).") from None
    if not isinstance(value, dict):
        raise ModelError(f"{file_name}: expected a JSON object.")
    return value


def _find_files(folder: Path) -> list[Path]:
    single = folder / SINGLE_FILE
    if single.exists():
        return [single]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder}: no *.safetensors file in the model folder.")
    if len(files) > MAX_FILES:
        raise ModelError(f"{folder}: more than {MAX_FILES} weight files.")
    return files


def _read_index(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index.name}: weight_map: missing.")
    for file_name in weight_map.values():
        # Names, never paths: an index must not reach outside its folder.
        if not isinstance(file_name, str) or not _FILE_NAME.fullmatch(file_name):
            raise ModelError(f"{index.name}: weight_map: {show(str(file_name))} is not a plain file name.")
    if len(set(weight_map.values())) > MAX_FILES:
        raise ModelError(f"{index.name}: weight_map: more than {MAX_FILES} files.")
    return weight_map


def _merge(parts: list[dict[str, TensorInfo]]) -> dict[str, TensorInfo]:
    merged: dict[str, TensorInfo] = {}
    for part in parts:
        for name, tensor in part.items():
            if name in merged:
                raise ModelError(
                    f"{tensor.path.name}: tensor {show(name)} is in {merged[name].path.name} too."
                )
            merged[name] = tensor
    return merged


def _read_entry(path: Path, name: str, entry: object, bounds: tuple[int, int]) -> TensorInfo:
    """Check one header entry. `bounds`: where the data starts, where the file ends."""
    label = f"{path.name}: tensor {show(name)}"
    if not isinstance(entry, dict):
        raise ModelError(f"{label}: its entry is not an object.")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _DTYPE_BYTES:
        raise ModelError(f"{label}: dtype: {show(str(dtype))} is unknown.")
    if not _are_ints(shape, MAX_DIMS, MAX_DIM) or not _are_ints(offsets, 2, MAX_DIM) or len(offsets) != 2:  # noqa: PLR2004
        raise ModelError(f"{label}: shape or data_offsets: not a short list of sizes.")
    begin, end = offsets
    start, size = bounds
    if not begin <= end <= size - start:
        raise ModelError(f"{label}: data_offsets: [{begin}, {end}) is outside the file (truncated?).")
    if math.prod(shape) * _DTYPE_BYTES[dtype] != end - begin:
        raise ModelError(f"{label}: data_offsets: {end - begin} bytes do not fit shape {shape} of {dtype}.")
    return TensorInfo(name, tuple(shape), dtype, path, start + begin, end - begin)


def _are_ints(value: object, max_count: int, max_value: int) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and len(value) <= max_count
        and all(type(item) is int and 0 <= item <= max_value for item in value)
    )
