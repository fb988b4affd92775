"""Token ids to text, all at once or one by one, with the same result.

Every token stands for some bytes, and text is the concatenation read as UTF-8: an invalid sequence
becomes one U+FFFD, and while streaming at most three bytes of a possibly unfinished character are held
back. Special tokens (end of turn and the like) stand for no bytes.
"""

import codecs
import json
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer as Backend

from engine.errors import ModelError

_SPACE_MARK = "▁"  # what sentencepiece writes for a space
_BYTE_TOKEN_CHARS = len("<0x00>")


class TokenBytes:
    """The bytes of each token of one vocabulary. `strips_space`: text loses one leading space."""

    def __init__(self, backend: Backend) -> None:
        """Read how the tokenizer decodes; raises `ModelError` for a way that is not known."""
        steps = _decoder_steps(backend)
        kinds = {step["type"] for step in steps}
        self._to_bytes: Callable[[str], bytes]
        if kinds == {"ByteLevel"}:
            self._to_bytes, self.strips_space = _byte_level, False
        elif kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
            self._to_bytes = _sentencepiece
            self.strips_space = any(_strips_space(step) for step in steps)
        else:
            raise ModelError(f"the tokenizer decodes with {sorted(kinds)}, which is not supported.")
        self._backend = backend
        self._special = {
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        }
        self._known: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes:
        """Return a token's bytes: none for special tokens and for ids outside the vocabulary."""
        known = self._known.get(token_id)
        if known is None:
            token = None if token_id in self._special else self._backend.id_to_token(token_id)
            known = self._known[token_id] = b"" if token is None else self._to_bytes(token)
        return known


class IncrementalDetokenizer:
    """Text of one growing sequence. The pushed parts and `finish` joined equal the whole decoded."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        """Start with no text."""
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strips_space = token_bytes.strips_space

    def push(self, token_id: int) -> str:
        """Return the text that is certain now; an unfinished character waits for its last byte."""
        return self._strip(self._decoder.decode(self._token_bytes.of(token_id)))

    def finish(self) -> str:
        """Return what was held back: U+FFFD for a character cut short."""
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if self._strips_space and text:
            self._strips_space = False
            return text.removeprefix(" ")
        return text


def decode(token_bytes: TokenBytes, token_ids: list[int]) -> str:
    """Return the text of all tokens."""
    text = b"".join(map(token_bytes.of, token_ids)).decode("utf-8", "replace")
    return text.removeprefix(" ") if token_bytes.strips_space else text


def _decoder_steps(backend: Backend) -> list[dict[str, Any]]:
    decoder = json.loads(backend.to_str())["decoder"] if backend.decoder is not None else None
    if decoder is None:
        return []
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return steps


def _strips_space(step: dict[str, Any]) -> bool:
    if step["type"] == "Strip":
        return bool(step.get("content") == " " and step.get("start", 0) > 0)
    return bool(step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")


def _make_byte_of_char() -> dict[str, int]:
    """Return GPT-2's alphabet: each byte has a printable character, most of them their own."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF_CHAR = _make_byte_of_char()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:  # an added token, written as plain text
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    if len(token) == _BYTE_TOKEN_CHARS and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(_SPACE_MARK, " ").encode()
