"""Hugging Face folders: what is read, and what is refused in one line."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.errors import ModelError
from engine.model.safetensors_folder import INDEX_FILE, read_json, read_safetensors_header, read_tensors


def content_of(header: object, data: int = 64) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + bytes(data)


def entry(**overrides: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32], **overrides}


def write(folder: Path, content: bytes, name: str = "model.safetensors") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def test_reads_what_the_formats_own_library_writes(tmp_path: Path) -> None:
    values = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    path = tmp_path / "model.safetensors"
    save_file(values, path, metadata={"format": "pt"})
    tensors = read_tensors(tmp_path)
    assert {name: (t.shape, t.dtype) for name, t in tensors.items()} == {
        "a": ((2, 3), "F32"),
        "b": ((4,), "BF16"),
    }
    place = tensors["a"]
    assert path.read_bytes()[place.offset : place.offset + place.num_bytes] == values["a"].numpy().tobytes()


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        read_safetensors_header(path)
    message = str(caught.value)
    assert "\n" not in message
    assert path.name in message
    return message


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    content = content_of({"a": entry(data_offsets=[0, 32])}, data=32)
    read_safetensors_header(write(tmp_path, content))
    for size in range(len(content)):
        refusal(write(tmp_path, content[:size]))


FAULTS: dict[str, tuple[object, str]] = {
    "not JSON": (b"{", "JSON"),
    "nested too deep": (b"[" * 200_000, "JSON"),
    "not an object": ([1], "object"),
    "entry not an object": ({"a": 3}, "'a'"),
    "unknown type": ({"a": entry(dtype="F99")}, "dtype"),
    "negative size": ({"a": entry(shape=[-2, -4])}, "shape"),
    "sizes not whole": ({"a": entry(shape=[2.0, 4])}, "shape"),
    "too many dimensions": ({"a": entry(shape=[1] * 50)}, "shape"),
    "one offset": ({"a": entry(data_offsets=[0])}, "data_offsets"),
    "backwards": ({"a": entry(data_offsets=[32, 0])}, "data_offsets"),
    "outside": ({"a": entry(data_offsets=[64, 96])}, "data_offsets"),
    "huge": ({"a": entry(shape=[1 << 40, 1 << 40])}, "shape"),
    "size does not fit": ({"a": entry(shape=[3, 4])}, "data_offsets"),
    "overlap": ({"a": entry(), "b": entry(data_offsets=[16, 48])}, "overlap"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_refused_by_name(fault: str, tmp_path: Path) -> None:
    header, named = FAULTS[fault]
    assert named in refusal(write(tmp_path, content_of(header)))


def test_a_huge_header_length_is_refused(tmp_path: Path) -> None:
    assert "header length" in refusal(write(tmp_path, b"\xff" * 8 + bytes(64)))


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


def test_an_index_says_which_files_count(tmp_path: Path) -> None:
    write(tmp_path, content_of({"a": entry()}), "one.safetensors")
    write(tmp_path, content_of({"b": entry()}), "two.safetensors")
    write(tmp_path, b"not looked at", "three.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    assert set(read_tensors(tmp_path)) == {"a", "b"}


@pytest.mark.parametrize(
    "name", ["../one.safetensors", "/etc/one.safetensors", "sub/one.safetensors", "pytorch_model.bin", "", 3]
)
def test_an_index_cannot_point_outside_its_folder_or_at_other_kinds_of_file(
    name: object, tmp_path: Path
) -> None:
    write_index(tmp_path, {"a": name})
    with pytest.raises(ModelError, match="not a plain file name"):
        read_tensors(tmp_path)


def test_an_index_that_does_not_agree_with_its_files_is_refused(tmp_path: Path) -> None:
    write(tmp_path, content_of({"a": entry()}), "one.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "one.safetensors"})
    with pytest.raises(ModelError, match="'b'"):
        read_tensors(tmp_path)
    write_index(tmp_path, [])
    with pytest.raises(ModelError, match="weight_map"):
        read_tensors(tmp_path)
    write_index(tmp_path, {"a": "absent.safetensors"})
    with pytest.raises(ModelError, match="absent"):
        read_tensors(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path, content_of({"a": entry()}), f"{name}.safetensors")
    with pytest.raises(ModelError, match="'a'"):
        read_tensors(tmp_path)


def test_a_folder_with_pickled_weights_only_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        read_tensors(tmp_path)


def test_json_files_are_bounded_objects(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(ModelError, match="cannot read"):
        read_json(path)
    path.write_text("[]")
    with pytest.raises(ModelError, match="object"):
        read_json(path)
