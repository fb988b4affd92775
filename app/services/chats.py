"""The chat playground: conversations in memory, answers that go on without a connection, history behind."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final
from uuid import uuid4

from app.errors import HistoryUnavailableError
from app.services.chat_answers import Answer, Engine
from app.services.chat_rules import (
    ChatInput,
    ChatStateError,
    UnknownChatError,
    adopt,
    check_can_answer,
    check_can_drop,
    check_idle,
    check_present,
    count_turns_to_drop,
)
from app.services.chat_store import ChatStore, ConversationHead
from app.services.chat_types import (
    MAX_TEXT_CHARS,
    MAX_TITLE_CHARS,
    MAX_TURNS,
    Conversation,
    Message,
    MessageStatus,
    Role,
    Turn,
    check_text,
    make_title,
)
from engine.errors import RequestError

MAX_CONVERSATIONS: Final = 64
MAX_CHARS: Final = 32 * 2**20
"""What stays in memory of conversations in which nothing is written now."""

MAX_DELETED: Final = 1024
_STOP_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True)
class HeadList:
    """The newest conversations. `fault` says why those of the history are missing, if they are."""

    heads: list[ConversationHead]
    has_more: bool
    fault: str = ""


class ChatService:
    """Lives on the event loop. Works without the history, which then does not have what was said."""

    def __init__(
        self,
        engine: Engine,
        store: ChatStore,
        session_id: str,
        *,
        is_text_kept: Callable[[], bool],
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Answer with `engine`; keep in `store` while `is_text_kept` says so."""
        self._engine = engine
        self._store = store
        self._session_id = session_id
        self._is_text_kept = is_text_kept
        self._wall_ns = wall_ns
        self._conversations: OrderedDict[str, Conversation] = OrderedDict()
        self._answers: dict[str, Answer] = {}
        self._deleted: OrderedDict[str, None] = OrderedDict()

    @property
    def keeps_text(self) -> bool:
        """Whether new conversations are stored."""
        return self._is_text_kept()

    async def stop(self) -> None:
        """End all answers; what they have so far is put to the history."""
        tasks = [answer.task for answer in self._answers.values() if answer.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_STOP_TIMEOUT_S)

    # ---------------------------------------------------------------- reading

    async def list_heads(self, limit: int) -> HeadList:
        """Return the conversations that were used last."""
        heads: dict[str, ConversationHead] = {}
        fault = ""
        try:
            stored = await self._store.list_heads(limit + len(self._deleted) + 1)
            heads = {head.id: head for head in stored if head.id not in self._deleted}
        except HistoryUnavailableError as error:
            fault = str(error)
        for conversation in self._conversations.values():
            heads[conversation.id] = ConversationHead(
                conversation.id, conversation.title, conversation.updated_ns
            )
        ordered = sorted(heads.values(), key=lambda head: (-head.updated_ns, head.id))
        return HeadList(ordered[:limit], len(ordered) > limit, fault)

    async def get(self, conversation_id: str) -> Conversation:
        """Return a conversation; raises `UnknownChatError`, `HistoryUnavailableError`."""
        conversation = self._conversations.get(conversation_id)
        if conversation is None and conversation_id not in self._deleted:
            loaded = await self._store.load(conversation_id)
            # It may have been loaded or deleted by somebody else meanwhile.
            conversation = self._conversations.get(conversation_id)
            if conversation is None and loaded is not None and conversation_id not in self._deleted:
                conversation = loaded
                self._keep(conversation)
        if conversation is None:
            raise UnknownChatError("There is no such conversation; perhaps it was deleted.")
        self._conversations.move_to_end(conversation_id)
        return conversation

    async def find(self, conversation_id: str, message_id: str) -> tuple[Conversation, Turn, Message]:
        """Return a message with what it is in; raises as `get` does."""
        conversation = await self.get(conversation_id)
        try:
            turn, message = conversation.find(message_id)
        except KeyError:
            raise UnknownChatError("There is no such message in this conversation.") from None
        return conversation, turn, message

    def get_answer(self, message_id: str) -> Answer | None:
        """Return the answer that is being written, None once it has ended."""
        return self._answers.get(message_id)

    # ---------------------------------------------------------------- asking

    def create(self, asked: ChatInput) -> Conversation:
        """Begin a conversation and its first answer; raises `RequestError` naming a field."""
        now_ns = self._wall_ns()
        conversation = Conversation(
            id=uuid4().hex,
            created_ns=now_ns,
            updated_ns=now_ns,
            title=make_title(asked.text),
            is_stored=self._is_text_kept(),
        )
        self._ask(conversation, asked)
        return conversation

    async def ask(self, conversation_id: str, asked: ChatInput) -> Conversation:
        """Add a question and begin its answer; raises `RequestError`."""
        conversation = await self.get(conversation_id)
        check_idle(conversation)
        if len(conversation.turns) >= MAX_TURNS:
            raise ChatStateError(f"A conversation ends after {MAX_TURNS} turns; begin a new one.")
        self._ask(conversation, asked)
        return conversation

    async def regenerate(
        self, conversation_id: str, message_id: str, asked: ChatInput | None = None
    ) -> Conversation:
        """Begin another variant of the newest answer; the older ones stay."""
        conversation, turn, _ = await self.find(conversation_id, message_id)
        check_can_answer(conversation, turn)
        if asked is not None:
            adopt(conversation, asked, self._engine.priorities)
        self._begin_answer(conversation, turn)
        return conversation

    async def continue_without_oldest(self, conversation_id: str, message_id: str) -> Conversation:
        """Leave out as few of the oldest turns as it takes to answer the newest question, and answer it.

        Raises `ChatStateError` if that cannot help.
        """
        conversation, turn, _ = await self.find(conversation_id, message_id)
        check_can_drop(conversation, turn)
        answer = turn.answer
        is_cut = answer is not None and answer.stats.is_context_full  # it fits, but for the answer's end
        num_dropped = max(int(is_cut), await count_turns_to_drop(self._engine, conversation))
        check_present(conversation, self._conversations)  # counting took a while
        check_can_drop(conversation, turn)
        dropped = conversation.sent_turns()[:num_dropped]
        changed = [message for old in dropped for message in old.leave_out()]
        self._begin_answer(conversation, turn, changed)
        return conversation

    async def stop_answer(self, conversation_id: str, message_id: str) -> Conversation:
        """End an answer where it is; does nothing if it has ended."""
        conversation, _, message = await self.find(conversation_id, message_id)
        answer = self._answers.get(message.id)
        if answer is not None and answer.task is not None:
            answer.stop()
            await asyncio.wait([answer.task], timeout=_STOP_TIMEOUT_S)
            check_present(conversation, self._conversations)
        return conversation

    # ---------------------------------------------------------------- editing

    async def choose(self, conversation_id: str, message_id: str) -> Conversation:
        """Show one variant of an answer and send it to the model from now on."""
        conversation, turn, message = await self.find(conversation_id, message_id)
        check_idle(conversation)
        if message.role is not Role.ASSISTANT:
            raise ChatStateError("Only answers have variants.")
        turn.choose(message.variant)
        self._save(conversation, turn.answers)
        return conversation

    async def rename(self, conversation_id: str, title: str) -> Conversation:
        """Give a conversation another title; raises `RequestError` naming `title`."""
        conversation = await self.get(conversation_id)
        title = " ".join(title.split())
        check_text(title, "title", MAX_TITLE_CHARS)
        if not title:
            raise RequestError("title is empty; write one.", param="title", code="invalid_value")
        conversation.title = title
        self._save(conversation, ())
        return conversation

    async def delete(self, conversation_id: str) -> None:
        """Forget a conversation, here and in the history; an answer that is being written ends.

        Returns when the history has, too; raises `HistoryUnavailableError` if it could not, or not yet.
        """
        conversation = await self.get(conversation_id)
        self._deleted[conversation_id] = None
        if len(self._deleted) > MAX_DELETED:
            self._deleted.popitem(last=False)
        conversation.is_stored = False
        self._conversations.pop(conversation_id, None)
        for message in conversation.messages:
            answer = self._answers.get(message.id)
            if answer is not None:
                answer.stop()
        if conversation.is_in_history:
            # If the history does not take it, the conversation is there still, and is shown again.
            await self._store.delete(conversation_id, lambda: self._deleted.pop(conversation_id, None))

    # ---------------------------------------------------------------- inside

    def _ask(self, conversation: Conversation, asked: ChatInput) -> None:
        check_text(asked.text, "text", MAX_TEXT_CHARS)
        if not asked.text.strip():
            raise RequestError("text is empty; write a message.", param="text", code="invalid_value")
        adopt(conversation, asked, self._engine.priorities)
        question = Message(
            id=uuid4().hex,
            position=2 * len(conversation.turns),
            role=Role.USER,
            text=asked.text,
            status=MessageStatus.COMPLETE,
            created_ns=self._wall_ns(),
        )
        turn = Turn(question)
        conversation.turns.append(turn)
        self._begin_answer(conversation, turn, [question])

    def _begin_answer(self, conversation: Conversation, turn: Turn, changed: Iterable[Message] = ()) -> None:
        message = Message(
            id=uuid4().hex,
            position=turn.question.position + 1,
            variant=len(turn.answers),
            role=Role.ASSISTANT,
            status=MessageStatus.STREAMING,
            created_ns=self._wall_ns(),
            request_id=f"chatcmpl-{uuid4().hex}",
            session_id=self._session_id,
        )
        turn.answers.append(message)
        turn.choose(message.variant)
        conversation.updated_ns = message.created_ns
        self._keep(conversation)
        self._save(conversation, [*changed, *turn.answers])
        answer = Answer(
            self._engine,
            conversation,
            message,
            save=lambda kept: self._save(conversation, [kept]),
            is_stored=partial(self._look_whether_stored, conversation),
        )
        self._answers[message.id] = answer
        answer.start()
        assert answer.task is not None  # noqa: S101 - it was started
        answer.task.add_done_callback(lambda _: self._answers.pop(message.id, None))

    def _save(self, conversation: Conversation, messages: Iterable[Message]) -> None:
        if self._look_whether_stored(conversation):
            is_taken = self._store.save(conversation, messages, partial(_mark_unstored, conversation))
            conversation.is_in_history = conversation.is_in_history or is_taken

    def _look_whether_stored(self, conversation: Conversation) -> bool:
        """Return whether a conversation is stored; once texts are not kept it is not, for good."""
        conversation.is_stored = conversation.is_stored and self._is_text_kept()
        return conversation.is_stored

    def _keep(self, conversation: Conversation) -> None:
        """Have it in memory as used last; let go of others if there are too many, stored ones first."""
        self._conversations[conversation.id] = conversation
        self._conversations.move_to_end(conversation.id)
        idle = [
            old for old in self._conversations.values() if old.streaming is None and old is not conversation
        ]
        idle.sort(key=lambda old: not old.is_stored)
        num_chars = sum(old.num_chars for old in idle)
        num_over = len(self._conversations) - MAX_CONVERSATIONS
        for old in idle:
            if num_over <= 0 and num_chars <= MAX_CHARS:
                break
            del self._conversations[old.id]
            num_over -= 1
            num_chars -= old.num_chars


def _mark_unstored(conversation: Conversation) -> None:
    conversation.is_stored = False
