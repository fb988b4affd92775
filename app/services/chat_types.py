"""What a chat of the playground is made of, and which of its turns the model gets."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import msgspec

from engine.errors import RequestError
from engine.sampling_params import SamplingParams

MAX_TEXT_CHARS: Final = 100_000
MAX_TITLE_CHARS: Final = 120
MAX_TURNS: Final = 200
MAX_VARIANTS: Final = 50
_AUTO_TITLE_CHARS: Final = 60

CONTEXT_CODE: Final = "context_length_exceeded"
"""Error code of an answer for which the conversation is too long."""


class MessageStatus(StrEnum):
    """How far a message is; all but STREAMING are final."""

    COMPLETE = "complete"
    STREAMING = "streaming"
    STOPPED = "stopped"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


class Role(StrEnum):
    """Who speaks."""

    USER = "user"
    ASSISTANT = "assistant"


class ChatParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling settings of a conversation; encoding leaves out what is not changed.

    `top_k` 0 is off, `seed` None a new one for each answer, `max_tokens` the longest answer. `priority` is a
    number, lower is more urgent, the name of a class, or None for the usual one.
    """

    temperature: float = 0.7
    top_p: float = 0.95
    top_k: int = 0
    max_tokens: int = 512
    seed: int | None = None
    stop: tuple[str, ...] = ()
    priority: int | str | None = None

    def to_sampling_params(self) -> SamplingParams:
        """Return them as the engine takes them."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            stop=self.stop,
        )


class AnswerStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is shown under an answer, from its step records.

    Milliseconds and tokens per second; 0 and None where nothing is known. `first_step` admitted it,
    `first_token_step` gave its first token, `last_step` its last. `finish_reason` is the engine's.
    `is_context_full`: the answer ended where the context does. `error_code` is a stable word, set if the
    answer failed.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    first_step: int = 0
    first_token_step: int = 0
    last_step: int = 0
    ttft_ms: float | None = None
    prefill_tok_s: float | None = None
    decode_tok_s: float | None = None
    finish_reason: str | None = None
    is_context_full: bool = False
    error_code: str | None = None

    @property
    def num_computed_tokens(self) -> int:
        """Prompt tokens that were not found in the cache."""
        return self.num_prompt_tokens - self.num_cached_tokens


DEFAULT_PARAMS: Final = ChatParams()
NO_STATS: Final = AnswerStats()


@dataclass(kw_only=True)
class Message:
    """One message. `position` counts from 0 (even: the user), `variant` the answers at one position."""

    id: str
    position: int
    variant: int = 0
    role: Role
    text: str = ""
    status: MessageStatus
    error: str | None = None
    created_ns: int
    request_id: str | None = None
    session_id: str | None = None
    stats: AnswerStats = NO_STATS
    is_left_out: bool = False
    is_chosen: bool = True

    @property
    def is_streaming(self) -> bool:
        """Whether it grows."""
        return self.status is MessageStatus.STREAMING


@dataclass
class Turn:
    """A question and the variants of its answer, oldest first; the last turn may have none yet."""

    question: Message
    answers: list[Message] = field(default_factory=list)

    @property
    def answer(self) -> Message | None:
        """The variant that is shown and sent to the model."""
        chosen = [answer for answer in self.answers if answer.is_chosen]
        return (chosen or self.answers)[-1] if self.answers else None

    @property
    def is_left_out(self) -> bool:
        """Whether it was left out to make room in the context."""
        return self.question.is_left_out

    @property
    def is_answered(self) -> bool:
        """Whether the variant that is shown has text; templates want questions and answers in turn."""
        return self.answer is not None and bool(self.answer.text)

    @property
    def messages(self) -> list[Message]:
        """Question and answers."""
        return [self.question, *self.answers]

    def leave_out(self) -> list[Message]:
        """Keep the turn from the model from now on; return what changed."""
        for message in self.messages:
            message.is_left_out = True
        return self.messages

    def choose(self, variant: int) -> None:
        """Show and send one of the answers."""
        for answer in self.answers:
            answer.is_chosen = answer.variant == variant


@dataclass(kw_only=True)
class Conversation:
    """A chat. `is_stored`: all of it so far is, or will be, in the history; never again once it is not.

    `is_in_history`: something of it is, or may be.
    """

    id: str
    created_ns: int
    updated_ns: int
    title: str
    system_prompt: str = ""
    params: ChatParams = DEFAULT_PARAMS
    turns: list[Turn] = field(default_factory=list)
    is_stored: bool = True
    is_in_history: bool = False

    @property
    def messages(self) -> Iterator[Message]:
        """All messages in order, every variant."""
        for turn in self.turns:
            yield from turn.messages

    @property
    def streaming(self) -> Message | None:
        """The answer that is being written, if one is."""
        answer = self.turns[-1].answer if self.turns else None
        return answer if answer is not None and answer.is_streaming else None

    @property
    def num_chars(self) -> int:
        """Roughly what it takes in memory."""
        return len(self.system_prompt) + sum(len(message.text) for message in self.messages)

    def find(self, message_id: str) -> tuple[Turn, Message]:
        """Return a message and its turn; raises `KeyError`."""
        for turn in self.turns:
            for message in turn.messages:
                if message.id == message_id:
                    return turn, message
        raise KeyError(message_id)

    def make_prompt(self, num_skipped: int = 0) -> list[dict[str, str]]:
        """Return what the model gets for the newest question, less the `num_skipped` oldest turns."""
        system = {"role": "system", "content": self.system_prompt}
        messages = [system] if self.system_prompt.strip() else []
        for turn in self.sent_turns()[num_skipped:]:
            assert turn.answer is not None  # noqa: S101 - see `sent_turns`
            messages.append({"role": "user", "content": turn.question.text})
            messages.append({"role": "assistant", "content": turn.answer.text})
        messages.append({"role": "user", "content": self.turns[-1].question.text})
        return messages

    def sent_turns(self) -> list[Turn]:
        """Return the earlier turns that the model gets with the newest question."""
        return [turn for turn in self.turns[:-1] if not turn.is_left_out and turn.is_answered]


def make_title(text: str) -> str:
    """Return the beginning of a text on one line."""
    line = " ".join(text.split())
    return line if len(line) <= _AUTO_TITLE_CHARS else f"{line[: _AUTO_TITLE_CHARS - 1].rstrip()}\u2026"


def check_text(text: str, param: str, max_chars: int = MAX_TEXT_CHARS) -> None:
    """Raise `RequestError` naming `param` if a text is too long."""
    if len(text) > max_chars:
        raise RequestError(
            f"{param} has {len(text)} characters; allowed: {max_chars}. Shorten it.",
            param=param,
            code="too_long",
        )
