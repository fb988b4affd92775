"""Prompts: begin tokens, chat templates, and what is refused."""

import sys
import threading
from typing import Any

import pytest

from engine.errors import RequestError
from engine.model.tokenizer import Tokenizer, TokenizerLimits
from tests.support.tokenizers import make_byte_level, make_sentencepiece, make_source

VOCAB_SIZE = 320


def make_tokenizer(*, adds_begin: bool = False, vocab_size: int = VOCAB_SIZE, **settings: Any) -> Tokenizer:
    source = make_source(make_byte_level(adds_begin=adds_begin), **settings)
    return Tokenizer(source, TokenizerLimits(vocab_size, frozenset({5})))


BEGIN = make_byte_level().get_vocab()["<|begin|>"]
END = make_byte_level().get_vocab()["<|end|>"]


def test_a_completion_gets_one_begin_token_where_the_model_has_one() -> None:
    plain, adding = make_tokenizer(), make_tokenizer(adds_begin=True)
    assert plain.encode("hi") == adding.encode("hi")[1:]
    assert adding.encode("hi")[0] == BEGIN
    assert adding.encode("<|begin|>hi") == adding.encode("hi")
    assert plain.encode("") == []
    assert adding.encode("") == [BEGIN]


def test_a_chat_gets_exactly_the_begin_tokens_that_its_template_writes() -> None:
    for adds_begin in (False, True):
        token_ids = make_tokenizer(adds_begin=adds_begin).encode_chat([{"role": "user", "content": "hi"}])
        assert token_ids.count(BEGIN) == 1
        assert token_ids.count(END) == 1
        assert make_tokenizer().decode(token_ids) == "user: hiassistant:"


def test_end_tokens_are_those_of_tokenizer_and_model() -> None:
    assert make_tokenizer().eos_token_ids == {5, END}


def chat_refusal(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        tokenizer.encode_chat(messages)
    assert caught.value.param == "messages"
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_template_that_refuses_is_a_request_error_with_its_message() -> None:
    error = chat_refusal(make_tokenizer(), [{"role": "tool", "content": "x"}])
    assert "tools are not supported" in str(error)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[7].content.x }}",
        "{% broken",
        "{{ 1 / 0 }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ x() }}",
    ],
)
def test_a_template_that_fails_or_reaches_out_is_a_request_error(template: str) -> None:
    chat_refusal(make_tokenizer(chat_template=template), [{"role": "user", "content": "hi"}])


def test_a_model_without_a_template_refuses_chats() -> None:
    tokenizer = make_tokenizer(chat_template=None)
    assert chat_refusal(tokenizer, [{"role": "user", "content": "hi"}]).code == "no_chat_template"


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        make_tokenizer().encode("a\ud800b")
    assert caught.value.param == "prompt"
    chat_refusal(make_tokenizer(), [{"role": "user", "content": "\ud800"}])


def test_tokens_outside_the_models_vocabulary_are_refused() -> None:
    with pytest.raises(RequestError, match="no weights"):
        make_tokenizer(vocab_size=100).encode("é")


def test_decoding_and_streaming_agree_in_both_kinds() -> None:
    for backend in (make_byte_level(), make_sentencepiece()):
        tokenizer = Tokenizer(make_source(backend), TokenizerLimits(VOCAB_SIZE, frozenset()))
        token_ids = tokenizer.encode("hi, café 😀 hi")
        detokenizer = tokenizer.make_detokenizer()
        streamed = "".join(map(detokenizer.push, token_ids)) + detokenizer.finish()
        assert streamed == tokenizer.decode(token_ids) == "hi, café 😀 hi"


@pytest.mark.parametrize("make_backend", [make_byte_level, make_sentencepiece])
def test_no_token_stands_for_more_characters_than_the_limit_says(make_backend: Any) -> None:
    backend = make_backend()
    tokenizer = Tokenizer(make_source(backend), TokenizerLimits(400, frozenset()))
    longest = max(len(tokenizer.decode([token_id])) for token_id in backend.get_vocab().values())
    assert longest <= tokenizer.max_token_chars == len("<|begin|>")


def test_encoding_leaves_the_interpreter_to_other_threads() -> None:
    tokenizer, ticks, done = make_tokenizer(), list[None](), threading.Event()

    def tick() -> None:
        while not done.wait(0.001):
            ticks.append(None)

    thread = threading.Thread(target=tick)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(100)  # from now on threads take turns only where one lets go
    try:
        thread.start()
        before = len(ticks)
        tokenizer.encode("hi, café and more " * 50_000)
        assert len(ticks) - before > 5
    finally:
        done.set()
        sys.setswitchinterval(interval_s)
        thread.join()
