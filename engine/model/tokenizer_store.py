"""Loads a model's tokenizer; the one inside a GGUF file is converted once and kept in the cache folder.

Converting takes seconds, loading the converted one a tenth of a second. The cache's key is the content
of the GGUF header together with the versions of what converts it; a cache entry that is not exactly
what was written is made again.
"""

import contextlib
import hashlib
import json
import logging
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import ModelError
from engine.model.check import ModelFiles
from engine.model.tokenizer import Tokenizer, TokenizerLimits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

_FORMAT_VERSION = 1
_MANIFEST = "manifest.json"
_TOKENIZER_FILE = "tokenizer.json"
_TEMPORARY_PREFIX = ".making-"


def load_tokenizer(files: ModelFiles, cache_dir: Path) -> Tokenizer:
    """Return the tokenizer of a model; raises `ModelError` if there is none or it cannot be used."""
    limits = TokenizerLimits(files.config.vocab_size, files.config.eos_token_ids)
    if files.gguf is None:
        if not (files.path / _TOKENIZER_FILE).is_file():
            raise ModelError(f"{files.path}: no {_TOKENIZER_FILE} in the model folder.")
        return Tokenizer(_load_folder(files.path), limits)
    folder = cache_dir / "tokenizers" / _cache_key(files)
    if _is_intact(folder):
        with contextlib.suppress(ModelError):
            return Tokenizer(_load_folder(folder), limits)
    source = _convert(files.path)
    _store(source, folder)
    return Tokenizer(source, limits)


def _tokenizer_class() -> "type[PreTrainedTokenizerFast]":
    # Imported here and not above: it takes 0.7 s, which the caller's thread spends on the weights.
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    tokenizer_class: type[PreTrainedTokenizerFast] = PreTrainedTokenizerFast
    return tokenizer_class


def _load_folder(folder: Path) -> "PreTrainedTokenizerFast":
    try:
        # This class reads data only; it never looks at an `auto_map`, which names code.
        return _tokenizer_class().from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # the library raises many kinds for damaged files
        raise ModelError(f"{folder}: cannot load the tokenizer ({_first_line(error)}).") from error


def _convert(path: Path) -> "PreTrainedTokenizerFast":
    try:
        return _tokenizer_class().from_pretrained(
            str(path.parent), gguf_file=path.name, local_files_only=True
        )
    except Exception as error:  # the library raises many kinds for damaged files
        raise ModelError(f"{path.name}: cannot convert its tokenizer ({_first_line(error)}).") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _cache_key(files: ModelFiles) -> str:
    assert files.gguf is not None
    digest = hashlib.sha256()
    versions = (_FORMAT_VERSION, version("transformers"), version("tokenizers"))
    digest.update(repr(versions).encode())
    with files.path.open("rb") as file:
        digest.update(file.read(files.gguf.header_bytes))
    return digest.hexdigest()


def _store(source: "PreTrainedTokenizerFast", folder: Path) -> None:
    """Write a cache entry whole or not at all; a cache that cannot be written is only slower."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(prefix=_TEMPORARY_PREFIX, dir=folder.parent))
    except OSError as error:
        logger.warning("The tokenizer cache in %s cannot be written: %s", folder.parent, error)
        return
    try:
        source.save_pretrained(str(making))
        sums = {path.name: _sha256(path) for path in sorted(making.iterdir())}
        (making / _MANIFEST).write_text(json.dumps(sums))
        shutil.rmtree(folder, ignore_errors=True)
        making.rename(folder)
    except OSError as error:  # a full disk, or another process was first
        logger.warning("The tokenizer cache entry %s was not written: %s", folder, error)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _is_intact(folder: Path) -> bool:
    try:
        sums = json.loads((folder / _MANIFEST).read_bytes())
        return bool(sums) and all(_sha256(folder / Path(name).name) == sums[name] for name in sums)
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
