"""Bodies of the OpenAI API as they come in, and which fields of that API this server knows.

Fields that would change the answer and are not served are refused by name; fields that nobody knows
are ignored and counted (`app.web.openai_requests`).
"""

from typing import Any

import msgspec

MAX_MESSAGES = 256
MAX_PROMPTS = 64
MAX_CHOICES = 8
MAX_ANSWERS = 64
"""Prompts times `n`: one request may not fill the queue for everybody."""
DEFAULT_COMPLETION_TOKENS = 16
"""Length of a text completion when none is asked for, as in OpenAI's API; chats go on as long as they can."""


class StreamOptions(msgspec.Struct):
    """Options of a streamed answer."""

    include_usage: bool | None = None


class ContentPart(msgspec.Struct):
    """One part of a message; only text is served."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct):
    """One message of a chat."""

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: msgspec.Raw = msgspec.Raw(b"null")


class GenerationBody(msgspec.Struct, kw_only=True):
    """Fields that chat and text completions share. None means the default."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    priority: int | str | None = None
    """A number, lower is more urgent, or the name of a class."""

    user: Any = None
    """Who asks, for a limit of open requests; only a text counts, and anything else does no harm."""


class ChatCompletionBody(GenerationBody, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage]


class CompletionBody(GenerationBody, kw_only=True):
    """Body of `POST /v1/completions`. A prompt is text or token ids, alone or in a list."""

    prompt: str | list[str | int | list[int]]


NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "add_generation_prompt": (True,),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Known fields that are not served, with the values (beside null) that ask for nothing."""

HARMLESS_FIELDS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "safety_identifier",
        "service_tier",
        "store",
    }
)
"""Known fields that may be left out of account: they do not change the answer."""
