"""Text to token ids and back, and chat messages to prompts, through `transformers`.

Nothing here runs code from a model: tokenizers are data, and chat templates run in transformers'
sandbox.
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.errors import RequestError
from engine.model.chat_template import ChatTemplate
from engine.model.detokenizer import IncrementalDetokenizer, TokenBytes, decode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class TokenizerLimits:
    """What the model adds to its tokenizer: the width of its logits and its end tokens."""

    vocab_size: int
    eos_token_ids: frozenset[int]


class Tokenizer:
    """A model's tokenizer. Encoding may run in any thread, also in several at once.

    `max_token_chars`: characters of text that one token stands for at most. A text of more than n times
    as many has more than n tokens.
    """

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
        # In both kinds of vocabulary a token is spelled with at least as many characters as it stands for.
        self.max_token_chars: int = max(map(len, self._backend.get_vocab()), default=1)
        self._template = ChatTemplate(source, self._find_control_tokens())

    def _find_control_tokens(self) -> "re.Pattern[str] | None":
        """Return what matches the tokens that mean something beside their text, the longest first."""
        added = self._backend.get_added_tokens_decoder().values()
        texts = sorted((token.content for token in added if token.special), key=len, reverse=True)
        # Nothing can be cut inside of a single character.
        found = "|".join(re.escape(text) for text in texts if len(text) > 1)
        return re.compile(found) if found else None

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
        token_ids = self._encode([text], "prompt")
        if self._begin_token_id is not None and token_ids[:1] != [self._begin_token_id]:
            return [self._begin_token_id, *token_ids]
        return token_ids

    def render_chat(self, messages: list[dict[str, str]]) -> list[str]:
        """Return the text of a conversation, in pieces for `encode_rendered`.

        Runs the model's chat template, which may take any time. Raises `RequestError` (param "messages")
        if the model has no usable template or the template refuses the messages.
        """
        return self._template.render(messages)

    def encode_rendered(self, pieces: list[str]) -> list[int]:
        """Return the ids of a rendered conversation.

        The model's chat template writes all special tokens, so none is added.
        """
        return self._encode(pieces, "messages")

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the ids of a conversation, ready for the assistant's turn: `render_chat`, then encoded.

        Special tokens come from the template only: their names within a message are plain text.
        """
        return self.encode_rendered(self.render_chat(messages))

    def _encode(self, pieces: list[str], param: str) -> list[int]:
        try:
            # For one text as well: it leaves the interpreter to other threads, which `encode` does not.
            encodings = self._backend.encode_batch_fast(pieces, add_special_tokens=False)
        except (UnicodeEncodeError, TypeError):
            raise RequestError(
                f"{param} holds a character that is not valid Unicode (a lone surrogate).",
                param=param,
                code="invalid_value",
            ) from None
        token_ids = [token_id for encoding in encodings for token_id in encoding.ids]
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
