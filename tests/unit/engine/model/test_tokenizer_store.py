"""Where tokenizers come from: the folder of the model, or the cache of what was converted."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelError
from engine.model import tokenizer_store
from engine.model.check import ModelFiles, open_model
from engine.model.tokenizer_store import load_tokenizer
from tests.support.models import VARIANTS, make_reference, write_folder, write_gguf
from tests.support.tokenizers import make_byte_level, make_source, write_tokenizer


@pytest.fixture
def gguf(tmp_path: Path) -> ModelFiles:
    return open_model(write_gguf(make_reference(VARIANTS["llama tied"]), tmp_path / "tiny.gguf"))


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replace the conversion, which the integration test does for real, and list its calls."""
    calls: list[Path] = []

    def convert(path: Path) -> Any:
        calls.append(path)
        return make_source(make_byte_level(adds_begin=True))

    monkeypatch.setattr(tokenizer_store, "_convert", convert)
    return calls


def entries(cache_dir: Path) -> list[Path]:
    folder = cache_dir / "tokenizers"
    return sorted(folder.iterdir()) if folder.exists() else []


def test_a_tokenizer_is_converted_once(gguf: ModelFiles, conversions: list[Path], tmp_path: Path) -> None:
    first = load_tokenizer(gguf, tmp_path / "cache")
    second = load_tokenizer(gguf, tmp_path / "cache")
    assert conversions == [gguf.path]
    assert len(entries(tmp_path / "cache")) == 1
    messages = [{"role": "user", "content": "hi é"}]
    assert first.encode_chat(messages) == second.encode_chat(messages)
    assert first.encode("hi") == second.encode("hi")
    assert first.eos_token_ids == second.eos_token_ids


@pytest.mark.parametrize(
    "damage", ["truncate", "flip", "delete file", "delete manifest", "empty manifest", "list"]
)
def test_a_damaged_entry_is_made_again(
    damage: str, gguf: ModelFiles, conversions: list[Path], tmp_path: Path
) -> None:
    load_tokenizer(gguf, tmp_path / "cache")
    (entry,) = entries(tmp_path / "cache")
    target = entry / "tokenizer.json"
    content = target.read_bytes()
    match damage:
        case "truncate":
            target.write_bytes(content[:-10])
        case "flip":
            target.write_bytes(content[:50] + bytes([content[50] ^ 1]) + content[51:])
        case "delete file":
            target.unlink()
        case "delete manifest":
            (entry / "manifest.json").unlink()
        case "empty manifest":
            (entry / "manifest.json").write_text("{}")
        case _:
            (entry / "manifest.json").write_text("[1, 2]")
    load_tokenizer(gguf, tmp_path / "cache")
    load_tokenizer(gguf, tmp_path / "cache")
    assert len(conversions) == 2
    assert target.read_bytes() == content


def test_another_file_has_another_entry(gguf: ModelFiles, conversions: list[Path], tmp_path: Path) -> None:
    load_tokenizer(gguf, tmp_path / "cache")
    other = write_gguf(make_reference(VARIANTS["qwen2 with biases"]), tmp_path / "tiny.gguf")
    load_tokenizer(open_model(other), tmp_path / "cache")
    assert len(conversions) == len(entries(tmp_path / "cache")) == 2


def test_the_entry_moves_with_the_content_not_with_the_path(
    gguf: ModelFiles, conversions: list[Path], tmp_path: Path
) -> None:
    load_tokenizer(gguf, tmp_path / "cache")
    copy = tmp_path / "copy.gguf"
    shutil.copy(gguf.path, copy)
    load_tokenizer(open_model(copy), tmp_path / "cache")
    assert len(conversions) == 1


def test_a_cache_that_cannot_be_written_is_only_slower(
    gguf: ModelFiles, conversions: list[Path], tmp_path: Path
) -> None:
    blocked = tmp_path / "cache"
    blocked.write_text("a file, not a folder")
    assert load_tokenizer(gguf, blocked).encode("hi")
    assert load_tokenizer(gguf, blocked).encode("hi")
    assert len(conversions) == 2


def test_nothing_half_made_stays_behind(gguf: ModelFiles, conversions: list[Path], tmp_path: Path) -> None:
    load_tokenizer(gguf, tmp_path / "cache")
    (entry,) = entries(tmp_path / "cache")
    assert set(json.loads((entry / "manifest.json").read_text())) == {
        path.name for path in entry.iterdir() if path.name != "manifest.json"
    }


def test_a_folder_brings_its_own_tokenizer(tmp_path: Path) -> None:
    folder = write_folder(make_reference(VARIANTS["llama tied"]), tmp_path / "model")
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        load_tokenizer(open_model(folder), tmp_path / "cache")
    write_tokenizer(folder, make_byte_level())
    tokenizer = load_tokenizer(open_model(folder), tmp_path / "cache")
    assert tokenizer.decode(tokenizer.encode("hi é")) == "hi é"
    assert not entries(tmp_path / "cache")


def test_a_damaged_tokenizer_in_a_folder_is_refused(tmp_path: Path) -> None:
    folder = write_folder(make_reference(VARIANTS["llama tied"]), tmp_path / "model")
    write_tokenizer(folder, make_byte_level())
    (folder / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(ModelError, match="cannot load the tokenizer"):
        load_tokenizer(open_model(folder), tmp_path / "cache")


def test_code_that_a_tokenizer_names_is_never_imported(tmp_path: Path) -> None:
    folder = write_folder(make_reference(VARIANTS["llama tied"]), tmp_path / "model")
    write_tokenizer(folder, make_byte_level())
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "auto_map": {"AutoTokenizer": ["canary.T", "canary.T"]}}))
    (folder / "canary.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert load_tokenizer(open_model(folder), tmp_path / "cache").encode("hi")
    assert not (tmp_path / "ran").exists()


def test_a_gguf_file_without_a_tokenizer_is_refused(gguf: ModelFiles, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot convert its tokenizer"):
        load_tokenizer(gguf, tmp_path / "cache")
    assert not entries(tmp_path / "cache")


@pytest.mark.parametrize("adds_begin", [True, False])
def test_a_tokenizer_from_a_gguf_file_works_the_same_converted_and_cached(
    adds_begin: bool, tmp_path: Path
) -> None:
    backend = make_byte_level()
    begin, end = backend.get_vocab()["<|begin|>"], backend.get_vocab()["<|end|>"]
    variant = replace(VARIANTS["llama tied"], overrides={"bos_token_id": begin, "eos_token_id": end})
    path = write_gguf(
        make_reference(variant), tmp_path / "tiny.gguf", tokenizer=backend, adds_begin=adds_begin
    )
    for _ in range(2):
        tokenizer = load_tokenizer(open_model(path), tmp_path / "cache")
        expected = backend.encode("hi é <think>").ids
        assert tokenizer.encode("hi é <think>") == ([begin, *expected] if adds_begin else expected)
        chat = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
        assert chat == backend.encode("<|begin|>user: hi<|end|>assistant:").ids
        assert tokenizer.eos_token_ids == {end}
    assert len(entries(tmp_path / "cache")) == 1
