"""Text to token ids and back, and chat messages to prompts, through `transformers`.

Nothing here runs code from a model: tokenizers are data, and chat templates run in transformers'
sandbox.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.errors import RequestError
from engine.model.detokenizer import IncrementalDetokenizer, TokenBytes, decode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_MAX_REASON_CHARS = 200


@dataclass(frozen=True, slots=True)
class TokenizerLimits:
    """What the model adds to its tokenizer: the width of its logits and its end tokens."""

    vocab_size: int
    eos_token_ids: frozenset[int]


class Tokenizer:
    """A model's tokenizer. Encoding may run in any thread, also in several at once."""

    def __init__(self, source: "PreTrainedTokenizerFast", limits: TokenizerLimits) -> None:
        """Wrap a loaded tokenizer; raises `ModelError` if its way of decoding is not known."""
        self.vocab_size = limits.vocab_size
        eos_token_id = source.eos_token_id
        own = {eos_token_id} if isinstance(eos_token_id, int) and eos_token_id < limits.vocab_size else set()
        self.eos_token_ids = limits.eos_token_ids | own
        self._source = source
        self._backend = source.backend_tokenizer
        self._token_bytes = TokenBytes(self._backend)
        self._begin_token_id = self._find_begin_token()

    def _find_begin_token(self) -> int | None:
        """Return the token that the tokenizer puts before a text, if it does."""
        bos: int | None = self._source.bos_token_id
        added: list[int] = self._backend.encode("", add_special_tokens=True).ids
        return bos if bos is not None and added[:1] == [bos] else None

    def encode(self, text: str) -> list[int]:
        """Return the ids of a completion prompt.

        A model with a begin token gets it once: it is not added to a text that starts with it. Raises
        `RequestError` (param "prompt") for text that is not valid Unicode.
        """
        token_ids = self._encode(text, "prompt")
        if self._begin_token_id is not None and token_ids[:1] != [self._begin_token_id]:
            return [self._begin_token_id, *token_ids]
        return token_ids

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the ids of a conversation, ready for the assistant's turn.

        The model's chat template writes all special tokens, so none is added. Raises `RequestError`
        (param "messages") if the model has no template or the template refuses the messages.
        """
        if not self._source.chat_template:
            raise RequestError(
                "This model has no chat template; use /v1/completions.",
                param="messages",
                code="no_chat_template",
            )
        try:
            text = self._source.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # noqa: BLE001 - a template is code from the model file: it may raise anything
            raise RequestError(
                f"The model's chat template refuses these messages: {_one_line(error)}",
                param="messages",
                code="chat_template_error",
            ) from None
        return self._encode(str(text), "messages")

    def _encode(self, text: str, param: str) -> list[int]:
        try:
            token_ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        except (UnicodeEncodeError, TypeError):
            raise RequestError(
                f"{param} holds a character that is not valid Unicode (a lone surrogate).",
                param=param,
                code="invalid_value",
            ) from None
        if token_ids and max(token_ids) >= self.vocab_size:
            raise RequestError(
                f"{param} holds a token that the model has no weights for.", param=param, code="invalid_value"
            )
        return token_ids

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return decode(self._token_bytes, token_ids)

    def make_detokenizer(self) -> IncrementalDetokenizer:
        """Return a detokeniser for one sequence that is being generated."""
        return IncrementalDetokenizer(self._token_bytes)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:_MAX_REASON_CHARS]
