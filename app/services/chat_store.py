"""Conversations in the history database: written behind, read when memory does not have them."""

from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec
from sqlalchemy import delete, func, select, update
from sqlalchemy.dialects.sqlite import insert

from app.db.database import Database
from app.db.models import ConversationRow, MessageRow, RequestRow, RequestTextRow
from app.db.writer import HistoryWriter
from app.db.writes import Write
from app.services.chat_types import (
    AnswerStats,
    ChatParams,
    Conversation,
    Message,
    MessageStatus,
    Role,
    Turn,
)
from app.services.write_through import write_through

_ROW_BYTES: Final = 512
"""Roughly what a row takes beside its texts."""


class ConversationHead(msgspec.Struct, frozen=True):
    """One line of the list of conversations."""

    id: str
    title: str
    updated_ns: int


class ChatStore:
    """Never waits for a write; what is lost, `on_lost` is told."""

    def __init__(self, database: Database, writer: HistoryWriter) -> None:
        """Write through `writer`, read from `database`."""
        self._database = database
        self._writer = writer
        self._upsert_conversation = _make_upsert(ConversationRow)
        self._upsert_message = _make_upsert(MessageRow)

    def save(
        self, conversation: Conversation, messages: Iterable[Message], on_lost: Callable[[], None]
    ) -> bool:
        """Keep the conversation and some of its messages as they are now; False if they are lost at once."""
        rows = [_message_row(conversation.id, message) for message in messages]
        num_bytes = sum(_ROW_BYTES + 4 * len(row["text"]) for row in rows)
        head = Write(
            self._upsert_conversation,
            [_conversation_row(conversation)],
            num_bytes=_ROW_BYTES + 4 * len(conversation.system_prompt),
            on_lost=on_lost,
        )
        writes = [head, Write(self._upsert_message, rows, num_bytes=num_bytes)] if rows else [head]
        return self._writer.put(*writes)

    async def delete(self, conversation_id: str, on_lost: Callable[[], object]) -> None:
        """Forget a conversation with all that was said, there and in the texts of its requests.

        Returns when that is written. Raises `HistoryUnavailableError` if it is lost, which `on_lost` is told
        too, or still waits; `on_lost` may then be told later.
        """
        requests = select(RequestRow.id).where(RequestRow.conversation_id == conversation_id)
        without_stop = func.json_remove(RequestRow.params, "$.stop")
        await write_through(
            self._writer,
            delete(RequestTextRow).where(RequestTextRow.request_id.in_(requests)),
            update(RequestRow)
            .where(RequestRow.conversation_id == conversation_id)
            .values(params=without_stop),
            delete(ConversationRow).where(ConversationRow.id == conversation_id),
            what="The deletion",
            on_lost=on_lost,
        )

    async def load(self, conversation_id: str) -> Conversation | None:
        """Return a conversation, None if there is none; raises `HistoryUnavailableError`."""
        async with self._database.read() as session:
            row = await session.get(ConversationRow, conversation_id)
            if row is None:
                return None
            messages = await session.scalars(
                select(MessageRow)
                .where(MessageRow.conversation_id == conversation_id)
                .order_by(MessageRow.position, MessageRow.variant)
            )
            return Conversation(
                id=row.id,
                created_ns=row.created_ns,
                updated_ns=row.updated_ns,
                title=row.title,
                system_prompt=row.system_prompt,
                params=msgspec.json.decode(row.params, type=ChatParams),
                turns=_make_turns(_read_message(message) for message in messages),
                is_in_history=True,
            )

    async def list_heads(self, limit: int) -> list[ConversationHead]:
        """Return the conversations that were used last; raises `HistoryUnavailableError`."""
        query = (
            select(ConversationRow.id, ConversationRow.title, ConversationRow.updated_ns)
            .order_by(ConversationRow.updated_ns.desc(), ConversationRow.id)
            .limit(limit)
        )
        async with self._database.read() as session:
            rows = await session.execute(query)
            return [ConversationHead(row.id, row.title, row.updated_ns) for row in rows]


def _make_upsert(table: type[ConversationRow] | type[MessageRow]) -> Any:
    statement = insert(table)
    values = {name: statement.excluded[name] for name in table.__table__.columns.keys() if name != "id"}  # noqa: SIM118 - not a dict
    return statement.on_conflict_do_update(index_elements=["id"], set_=values)


def _conversation_row(conversation: Conversation) -> dict[str, Any]:
    return {
        "id": conversation.id,
        "created_ns": conversation.created_ns,
        "updated_ns": conversation.updated_ns,
        "title": conversation.title,
        "system_prompt": conversation.system_prompt,
        "params": msgspec.json.encode(conversation.params).decode(),
    }


def _message_row(conversation_id: str, message: Message) -> dict[str, Any]:
    return {
        "id": message.id,
        "conversation_id": conversation_id,
        "position": message.position,
        "variant": message.variant,
        "role": message.role.value,
        "text": message.text,
        "status": message.status.value,
        "error": message.error,
        "created_ns": message.created_ns,
        "request_id": message.request_id,
        "session_id": message.session_id,
        "stats": msgspec.json.encode(message.stats).decode(),
        "is_left_out": message.is_left_out,
        "is_chosen": message.is_chosen,
    }


def _read_message(row: MessageRow) -> Message:
    status = MessageStatus(row.status)
    if status is MessageStatus.STREAMING:  # whoever wrote it is gone, or memory would have the conversation
        status = MessageStatus.INTERRUPTED
    return Message(
        id=row.id,
        position=row.position,
        variant=row.variant,
        role=Role(row.role),
        text=row.text,
        status=status,
        error=row.error,
        created_ns=row.created_ns,
        request_id=row.request_id,
        session_id=row.session_id,
        stats=msgspec.json.decode(row.stats, type=AnswerStats),
        is_left_out=row.is_left_out,
        is_chosen=row.is_chosen,
    )


def _make_turns(messages: Iterable[Message]) -> list[Turn]:
    turns: list[Turn] = []
    for message in messages:
        if message.role is Role.USER:
            turns.append(Turn(message))
        elif turns:
            turns[-1].answers.append(message)
    return turns
