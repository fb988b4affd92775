"""A model's chat template: checked once, then messages to text.

Templates are code from the model's files; they run in transformers' sandbox, which keeps them from
reaching out but not from taking long. Whoever renders does it where that hurts nobody.
"""

import logging
import secrets
from typing import TYPE_CHECKING

from engine.errors import RequestError

if TYPE_CHECKING:
    import re

    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

_MAX_REASON_CHARS = 200
_PROBE = "this template compiles"


class ChatTemplate:
    """Renders conversations.

    `control_tokens` matches the tokens that only the template may write. Where one of them stands in a
    message, the rendered text is cut inside of it: text that is encoded piece by piece has no such token.
    """

    def __init__(self, source: "PreTrainedTokenizerFast", control_tokens: "re.Pattern[str] | None") -> None:
        """Check the template; one that cannot be used is an error of each chat, not of the model."""
        self._source = source
        self._control_tokens = control_tokens
        # Nobody can guess it, so nobody can write it into a message. No letters: templates may change case.
        self._cut = f"\ufdd0{secrets.randbits(64)}\ufdd1"
        self._fault = _find_fault(source)
        if self._fault is not None:
            logger.warning("Chats will be refused, completions work: %s", self._fault)

    def render(self, messages: list[dict[str, str]]) -> list[str]:
        """Return the text of a conversation in pieces, ready for the assistant's turn.

        Raises `RequestError` (param "messages") if the model has no usable template or the template
        refuses the messages. Takes as long as the template takes.
        """
        if self._fault is not None:
            raise RequestError(self._fault.args[0], param="messages", code=self._fault.code)
        if self._control_tokens is not None:
            messages = [
                {**message, "content": self._control_tokens.sub(self._cut_token, message["content"])}
                for message in messages
            ]
        try:
            text = self._source.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # noqa: BLE001 - a template is code from the model file: it may raise anything
            raise RequestError(
                f"The model's chat template refuses these messages: {_one_line(error)}",
                param="messages",
                code="chat_template_error",
            ) from None
        return str(text).split(self._cut)

    def _cut_token(self, match: "re.Match[str]") -> str:
        token = match.group()
        return f"{token[:1]}{self._cut}{token[1:]}"


def _find_fault(source: "PreTrainedTokenizerFast") -> RequestError | None:
    """Return why the template cannot be used; it is compiled, but nothing of it runs."""
    if not source.chat_template:
        return RequestError("This model has no chat template; use /v1/completions.", code="no_chat_template")
    try:
        template = source.get_chat_template()
        source.apply_chat_template(
            [{"role": "user", "content": ""}],
            chat_template=f"{{{{ raise_exception('{_PROBE}') }}}}" + template,  # a TypeError if it is no text
            tokenize=False,
        )
    except Exception as error:  # noqa: BLE001 - the compiler of the templates may raise anything
        if str(error) == _PROBE:
            return None
        return RequestError(
            f"The model's chat template cannot be used ({_one_line(error)}); use /v1/completions.",
            code="chat_template_error",
        )
    return None


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:_MAX_REASON_CHARS]
