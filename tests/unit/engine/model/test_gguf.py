"""The GGUF reader: reads what the format's own library writes, and refuses everything else in one line."""

import contextlib
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from engine.errors import ModelError
from engine.model.gguf import GGUFArray, read_gguf

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def key(name: str, value_type: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", value_type) + value


def tensor(name: str, dims: tuple[int, ...], type_id: int = 0, offset: int = 0) -> bytes:
    packed = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + packed + struct.pack("<IQ", type_id, offset)


def file_bytes(
    *,
    keys: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: int = 256,
    counts: tuple[int, int] | None = None,
    start: bytes = b"GGUF\x03\x00\x00\x00",
) -> bytes:
    num_tensors, num_keys = counts or (len(tensors), len(keys))
    header = start + struct.pack("<QQ", num_tensors, num_keys) + b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + bytes(data)


def write(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return path


VALID = file_bytes(
    keys=(
        key("general.architecture", STRING, text("llama")),
        key("general.alignment", U32, struct.pack("<I", 32)),
        key("a.float", F32, struct.pack("<f", 1.5)),
        key("a.flag", BOOL, b"\x01"),
        key("a.words", ARRAY, struct.pack("<IQ", STRING, 2) + text("ab") + text("ü")),
        key("a.numbers", ARRAY, struct.pack("<IQ", U32, 3) + struct.pack("<3I", 7, 8, 9)),
    ),
    tensors=(tensor("x", (4, 2)), tensor("y", (32,), 8, 32)),
)


def test_reads_what_the_formats_own_library_writes(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(str(path), "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_array("tokenizer.ggml.tokens", ["a", "ü", "😀"])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0])
    first = np.arange(64, dtype=np.float32).reshape(2, 32)
    writer.add_tensor("first", first)
    quantised = quantize(first, GGMLQuantizationType.Q8_0)
    writer.add_tensor("second", quantised, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    gguf = read_gguf(path)
    assert gguf.metadata["general.architecture"] == "llama"
    assert gguf.metadata["llama.block_count"] == 3
    assert gguf.metadata["llama.rope.freq_base"] == 10000.0
    assert gguf.metadata["tokenizer.ggml.add_bos_token"] is False
    assert read_array(gguf.metadata["tokenizer.ggml.tokens"]) == ["a", "ü", "😀"]
    assert read_array(gguf.metadata["tokenizer.ggml.scores"]) == [0.5, -1.0]
    plain, packed = gguf.tensors["first"], gguf.tensors["second"]
    assert (plain.shape, plain.dtype, packed.shape, packed.dtype) == ((2, 32), "F32", (2, 32), "Q8_0")
    content = path.read_bytes()
    assert content[plain.offset : plain.offset + plain.num_bytes] == first.tobytes()
    assert content[packed.offset : packed.offset + packed.num_bytes] == quantised.tobytes()


def read_array(value: Any) -> list[Any]:
    assert isinstance(value, GGUFArray)
    return value.read()


def test_the_hand_made_file_of_these_tests_is_valid(tmp_path: Path) -> None:
    gguf = read_gguf(write(tmp_path, VALID))
    assert read_array(gguf.metadata["a.words"]) == ["ab", "ü"]
    assert gguf.tensors["x"].shape == (2, 4)
    assert gguf.tensors["y"].num_bytes == 34


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        read_gguf(path)
    message = str(caught.value)
    assert "\n" not in message
    assert path.name in message
    return message


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    end = VALID.index(bytes(64)) + 66  # the last byte of the last tensor is data byte 65
    for size in range(end):
        refusal(write(tmp_path, VALID[:size]))


def test_flipped_bits_never_crash_the_reader_or_make_it_allocate(tmp_path: Path) -> None:
    rng = random.Random(1)
    header_bytes = len(VALID) - 256
    tracemalloc.start()
    for _ in range(3000):
        damaged = bytearray(VALID)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            damaged[rng.randrange(header_bytes)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        with contextlib.suppress(ModelError):
            gguf = read_gguf(write(tmp_path, bytes(damaged)))
            assert all(t.offset + t.num_bytes <= len(damaged) for t in gguf.tensors.values())
            for value in gguf.metadata.values():
                if isinstance(value, GGUFArray):
                    value.read()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


HUGE = (1 << 64) - 1
FAULTS = {
    "not gguf": (file_bytes(start=b"ABCD\x03\x00\x00\x00"), "magic"),
    "version 1": (file_bytes(start=b"GGUF\x01\x00\x00\x00"), "version"),
    "big-endian": (file_bytes(start=b"GGUF\x00\x00\x00\x03"), "version"),
    "huge tensor count": (file_bytes(counts=(HUGE, 0)), "tensor count"),
    "tensor count over what fits": (file_bytes(counts=(100, 0)), "tensor count"),
    "huge key count": (file_bytes(counts=(0, 1 << 63)), "key count"),
    "huge key": (file_bytes(keys=(struct.pack("<Q", HUGE),), counts=(0, 1)), "key 0"),
    "key not UTF-8": (file_bytes(keys=(key("a", U32, bytes(4)).replace(b"a", b"\xff"),)), "UTF-8"),
    "key twice": (file_bytes(keys=(key("a", U32, bytes(4)),) * 2), "twice"),
    "unknown value type": (file_bytes(keys=(key("a", 13, bytes(16)),)), "value type 13"),
    "huge string": (file_bytes(keys=(key("a", STRING, struct.pack("<Q", HUGE)),)), "'a'"),
    "huge array": (file_bytes(keys=(key("a", ARRAY, struct.pack("<IQ", U64, HUGE)),)), "'a'"),
    "huge array of strings": (file_bytes(keys=(key("a", ARRAY, struct.pack("<IQ", STRING, HUGE)),)), "'a'"),
    "huge string in array": (
        file_bytes(keys=(key("a", ARRAY, struct.pack("<IQQ", STRING, 2, HUGE)),)),
        "'a'",
    ),
    "array of arrays": (file_bytes(keys=(key("a", ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(32)),)), "'a'"),
    "alignment 0": (file_bytes(keys=(key("general.alignment", U32, bytes(4)),)), "alignment"),
    "alignment 33": (file_bytes(keys=(key("general.alignment", U32, b"\x21\0\0\0"),)), "alignment"),
    "alignment text": (file_bytes(keys=(key("general.alignment", STRING, text("32")),)), "alignment"),
    "no dimensions": (file_bytes(tensors=(tensor("x", ()) + bytes(8),)), "dimensions"),
    "five dimensions": (file_bytes(tensors=(tensor("x", (1, 1, 1, 1, 1)),)), "dimensions"),
    "dimension 0": (file_bytes(tensors=(tensor("x", (4, 0)),)), "shape"),
    "product overflows 64 bits": (file_bytes(tensors=(tensor("x", (1 << 32, 1 << 32)),)), "'x'"),
    "row not whole blocks": (file_bytes(tensors=(tensor("x", (33,), 8),)), "Q8_0"),
    "unknown tensor type": (file_bytes(tensors=(tensor("x", (4,), 99),)), "type"),
    "offset not aligned": (file_bytes(tensors=(tensor("x", (4,), 0, 8),)), "offset"),
    "offset overflows": (file_bytes(tensors=(tensor("x", (4,), 0, HUGE - 31),)), "'x'"),
    "outside the file": (file_bytes(tensors=(tensor("x", (65,)),)), "truncated"),
    "overlap": (file_bytes(tensors=(tensor("x", (16,)), tensor("y", (4,), 0, 32))), "overlap"),
    "tensor twice": (file_bytes(tensors=(tensor("x", (4,)), tensor("x", (4,), 0, 32))), "twice"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_refused_by_name(fault: str, tmp_path: Path) -> None:
    content, named = FAULTS[fault]
    assert named in refusal(write(tmp_path, content))


def test_names_from_the_file_cannot_break_the_line(tmp_path: Path) -> None:
    content = file_bytes(tensors=(tensor("x\n\x1b[31m" + "y" * 500, (65,)),))
    assert len(refusal(write(tmp_path, content))) < 300


def test_a_string_that_is_not_utf8_is_refused_when_it_is_read(tmp_path: Path) -> None:
    words = key("a", ARRAY, struct.pack("<IQ", STRING, 1) + text(b"\xff"))
    gguf = read_gguf(write(tmp_path, file_bytes(keys=(words,))))
    with pytest.raises(ModelError, match="UTF-8"):
        read_array(gguf.metadata["a"])


def test_missing_empty_and_unreadable_files_are_refused(tmp_path: Path) -> None:
    refusal(tmp_path / "absent.gguf")
    refusal(write(tmp_path, b""))
    refusal(tmp_path)
