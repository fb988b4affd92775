"""Text piece by piece equals text at once, for any tokens."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from engine.errors import ModelError
from engine.model.detokenizer import IncrementalDetokenizer, TokenBytes, decode
from tests.support.tokenizers import BYTE_SPELLING, make_byte_level, make_sentencepiece

BYTE_LEVEL = make_byte_level()
SENTENCEPIECE = make_sentencepiece()
BACKENDS = {"byte level": BYTE_LEVEL, "sentencepiece": SENTENCEPIECE}
MAX_HELD_BYTES = 3


def stream(backend: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(TokenBytes(backend))
    return [*map(detokenizer.push, token_ids), detokenizer.finish()]


def ids_of(backend: Tokenizer) -> st.SearchStrategy[list[int]]:
    # A few ids lie outside the vocabulary: logits may be wider than it.
    return st.lists(st.integers(0, backend.get_vocab_size() + 5), max_size=40)


@given(ids_of(BYTE_LEVEL))
def test_byte_level_stream_equals_full_decode_for_any_tokens(token_ids: list[int]) -> None:
    known = [i for i in token_ids if BYTE_LEVEL.id_to_token(i) is not None]
    expected = BYTE_LEVEL.decode(known, skip_special_tokens=True)
    assert "".join(stream(BYTE_LEVEL, token_ids)) == expected
    assert decode(TokenBytes(BYTE_LEVEL), token_ids) == expected


@given(ids_of(SENTENCEPIECE))
def test_sentencepiece_stream_equals_full_decode_for_any_tokens(token_ids: list[int]) -> None:
    assert "".join(stream(SENTENCEPIECE, token_ids)) == decode(TokenBytes(SENTENCEPIECE), token_ids)


@pytest.mark.parametrize("name", BACKENDS)
@given(text=st.text(alphabet=st.characters(codec="utf-8", exclude_characters="▁"), max_size=40))
def test_any_text_survives_encoding_and_streaming(name: str, text: str) -> None:
    backend = BACKENDS[name]
    token_ids = backend.encode(text, add_special_tokens=False).ids
    expected = backend.decode(token_ids, skip_special_tokens=True)
    assert "".join(stream(backend, token_ids)) == expected
    if name == "byte level":
        assert expected == text


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    "text", ["👨‍👩‍👧‍👦 family", "  two spaces", "naïve café", "汉字", "a\n\n b", "é" * 30]
)
def test_characters_that_span_tokens_come_out_whole(name: str, text: str) -> None:
    backend = BACKENDS[name]
    token_ids = backend.encode(text, add_special_tokens=False).ids
    parts = stream(backend, token_ids)
    assert "".join(parts) == backend.decode(token_ids)
    assert not any("\ufffd" in part for part in parts)


def byte_ids(data: bytes) -> list[int]:
    token_ids = [BYTE_LEVEL.token_to_id(BYTE_SPELLING[byte]) for byte in data]
    return [token_id for token_id in token_ids if token_id is not None]


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        ("😀".encode(), ["", "", "", "😀", ""]),
        (b"\xff" + b"a", ["\ufffd", "a", ""]),
        ("😀".encode()[:3], ["", "", "", "\ufffd"]),
        ("😀".encode()[:2] + b"a", ["", "", "\ufffda", ""]),
        (b"\x80\x80", ["\ufffd", "\ufffd", ""]),
    ],
)
def test_incomplete_bytes_wait_and_invalid_ones_become_one_mark(data: bytes, parts: list[str]) -> None:
    assert stream(BYTE_LEVEL, byte_ids(data)) == parts


@given(st.binary(max_size=60))
def test_what_is_held_back_is_bounded(data: bytes) -> None:
    detokenizer = IncrementalDetokenizer(TokenBytes(BYTE_LEVEL))
    sent = ""
    for count, token_id in enumerate(byte_ids(data), 1):
        sent += detokenizer.push(token_id)
        certain = data[: max(count - MAX_HELD_BYTES, 0)].decode("utf-8", "ignore")
        assert len(sent) >= len(certain)
    assert sent + detokenizer.finish() == data.decode("utf-8", "replace")


@pytest.mark.parametrize("name", BACKENDS)
def test_special_tokens_have_no_text_and_added_ones_do(name: str) -> None:
    backend = BACKENDS[name]
    end, think = backend.token_to_id("<|end|>"), backend.token_to_id("<think>")
    assert end is not None
    assert think is not None
    assert "".join(stream(backend, [think, end])) == "<think>"


def test_one_leading_space_is_lost_only_where_the_full_decode_loses_it() -> None:
    token_ids = SENTENCEPIECE.encode("  hi", add_special_tokens=False).ids
    assert "".join(stream(SENTENCEPIECE, token_ids)) == SENTENCEPIECE.decode(token_ids)
    spaced = BYTE_LEVEL.encode(" hi", add_special_tokens=False).ids
    assert "".join(stream(BYTE_LEVEL, spaced)) == " hi"


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.CTC()])
def test_other_ways_of_decoding_are_refused(decoder: Any) -> None:
    backend = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(ModelError, match="not supported"):
        TokenBytes(backend)
