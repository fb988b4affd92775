"""Small tokenizers of the two kinds that supported models have."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

BYTE_SPELLING: dict[int, str] = bytes_to_unicode()

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('tools are not supported') }}{% endif %}"
    "{{ bos_token }}{{ message.role }}: {{ message.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def make_byte_level(*, adds_begin: bool = False) -> Tokenizer:
    """Return a byte-level BPE tokenizer; tokens may begin or end inside a character."""
    pieces = [BYTE_SPELLING[byte] for byte in range(256)]
    merges = [("h", "i"), ("Ġ", "h"), ("Ġ", "Ġ"), ("Ċ", "Ċ")]
    merges += [(BYTE_SPELLING[0xF0], BYTE_SPELLING[0x9F]), (BYTE_SPELLING[0xC3], BYTE_SPELLING[0xA9])]
    merges += [
        (BYTE_SPELLING[0xA9] + "", BYTE_SPELLING[0xC3])
    ]  # the end of one character and the next's begin
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys([*pieces, *map("".join, merges)]))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _finish(backend, adds_begin=adds_begin)


def make_sentencepiece(*, adds_begin: bool = False) -> Tokenizer:
    """Return a BPE tokenizer in sentencepiece's manner: marked spaces, bytes as a fallback."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghinot", "hi", "▁hi", "▁▁"]
    merges = [("h", "i"), ("▁", "hi"), ("▁", "▁")]
    backend = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=merges,
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _finish(backend, adds_begin=adds_begin)


def _finish(backend: Tokenizer, *, adds_begin: bool) -> Tokenizer:
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<|begin|>", "<|end|>")])
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    if adds_begin:
        begin = backend.token_to_id("<|begin|>")
        backend.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]
        )
    return backend


def make_source(backend: Tokenizer, **settings: Any) -> PreTrainedTokenizerFast:
    """Return a `transformers` tokenizer with begin and end tokens and a chat template."""
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **{
            "bos_token": "<|begin|>",
            "eos_token": "<|end|>",
            "chat_template": CHAT_TEMPLATE,
            **settings,
        },
    )


def write_tokenizer(folder: Path, backend: Tokenizer, **settings: Any) -> None:
    """Write the tokenizer files of a Hugging Face folder."""
    make_source(backend, **settings).save_pretrained(str(folder))
