"""What may be done to a conversation as it is, in the words of those who ask for it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from app.errors import NotInHistoryError
from app.services.chat_answers import Engine
from app.services.chat_types import (
    CONTEXT_CODE,
    MAX_TEXT_CHARS,
    MAX_VARIANTS,
    ChatParams,
    Conversation,
    Turn,
    check_text,
)
from app.services.priorities import Priorities
from engine.errors import RequestError

ROOM_SHARE: Final = 8
"""Dropping old turns leaves at least this part of the context for the answer, if it is to be that long."""


class UnknownChatError(NotInHistoryError):
    """There is no such conversation, here or in the history, or no such message in it."""


class ChatStateError(RequestError):
    """What was asked for does not go with what the conversation is at."""


@dataclass(frozen=True)
class ChatInput:
    """What somebody typed, checked: None for what is to stay as it is."""

    text: str = ""
    system_prompt: str | None = None
    params: ChatParams | None = None


def adopt(conversation: Conversation, asked: ChatInput, priorities: Priorities) -> None:
    """Take settings over, checked before anything changes."""
    if asked.system_prompt is not None:
        check_text(asked.system_prompt, "system_prompt", MAX_TEXT_CHARS)
    if asked.params is not None:
        asked.params.to_sampling_params().validate()
        priorities.find(asked.params.priority)
        conversation.params = asked.params
    if asked.system_prompt is not None:
        conversation.system_prompt = asked.system_prompt


def check_present(conversation: Conversation, held: Mapping[str, Conversation]) -> None:
    """Raise if a conversation was let go of while something was waited for: it must not come back."""
    if held.get(conversation.id) is not conversation:
        raise UnknownChatError("This conversation was deleted or let go of meanwhile; open it again.")


def check_idle(conversation: Conversation) -> None:
    """Raise `ChatStateError` while an answer is being written."""
    if conversation.streaming is not None:
        raise ChatStateError("An answer is being written; wait for its end or stop it.")


def check_can_answer(conversation: Conversation, turn: Turn) -> None:
    """Raise `ChatStateError` unless a turn's question can be answered once more now."""
    check_idle(conversation)
    if turn is not conversation.turns[-1]:
        raise ChatStateError("Only the newest question can be answered again.")
    if len(turn.answers) >= MAX_VARIANTS:
        raise ChatStateError(f"An answer has at most {MAX_VARIANTS} variants.")


def check_can_drop(conversation: Conversation, turn: Turn) -> None:
    """Raise `ChatStateError` unless the question can be answered again and that takes fewer old turns."""
    check_can_answer(conversation, turn)
    if not is_short_of_context(turn):
        raise ChatStateError("The newest answer does not lack room in the context; no turn has to go.")
    if not conversation.sent_turns():
        raise ChatStateError(
            "There is no older turn to leave out; ask for less at once, or shorten the system prompt."
        )


def can_drop_turns(conversation: Conversation, turn: Turn) -> bool:
    """Return whether the answer of a turn is one that leaving old turns out could help."""
    return turn is conversation.turns[-1] and is_short_of_context(turn) and bool(conversation.sent_turns())


def is_short_of_context(turn: Turn) -> bool:
    """Return whether the answer that is shown failed or ended for want of room in the context."""
    answer = turn.answer
    return answer is not None and (answer.stats.error_code == CONTEXT_CODE or answer.stats.is_context_full)


async def count_turns_to_drop(engine: Engine, conversation: Conversation) -> int:
    """Return the least number of turns that leaves room for an answer; all, if there is not that much room.

    Raises `ChatStateError` if even that is too little.
    """
    config = engine.host.config
    if config is None:
        engine.host.check_available()
        raise ChatStateError("The model is still loading; try again in a moment.")
    num_turns = len(conversation.sent_turns())
    room = max(1, min(conversation.params.max_tokens, config.max_model_len // ROOM_SHARE))

    async def fits(num_dropped: int, room: int) -> bool:
        num_tokens = await engine.generations.count_chat_tokens(conversation.make_prompt(num_dropped))
        return num_tokens + room <= config.max_model_len

    if not await fits(num_turns, 1):
        raise ChatStateError(
            f"Even without all older turns it does not fit into {config.max_model_len} tokens; "
            "ask for less at once, or shorten the system prompt."
        )
    least, most = 0, num_turns
    while least < most:  # the more turns are dropped, the shorter the prompt
        middle = (least + most) // 2
        if await fits(middle, room):
            most = middle
        else:
            least = middle + 1
    return least
