"""The chat of an application over a fake engine, as a browser without scripts uses it."""

import json
import re
from dataclasses import dataclass
from typing import Any

import httpx

from app.plugins import ApplicationPlugin
from app.services.chat_types import Conversation, Message
from tests.support.api import until

HTML = {"accept": "text/html"}


@dataclass
class Chatter:
    """Talks to the chat pages; `plugin` shows what is behind them."""

    client: httpx.AsyncClient
    plugin: ApplicationPlugin

    async def begin(self, text: str = "hello", **fields: Any) -> str:
        """Begin a conversation and return its id."""
        response = await self.client.post(
            "/chat", data={"text": text, "max_tokens": "12", **fields}, follow_redirects=False, headers=HTML
        )
        assert response.status_code == 303, response.text
        return response.headers["location"].removeprefix("/chat/")

    async def ask(self, conversation_id: str, text: str, **fields: Any) -> httpx.Response:
        return await self.client.post(
            f"/chat/{conversation_id}/messages",
            data={"text": text, **fields},
            follow_redirects=False,
            headers=HTML,
        )

    async def act(self, conversation_id: str, message_id: str, action: str, **fields: Any) -> httpx.Response:
        return await self.client.post(
            f"/chat/{conversation_id}/messages/{message_id}/{action}",
            data=fields,
            follow_redirects=False,
            headers=HTML,
        )

    async def read(self, conversation_id: str) -> str:
        """Return the page."""
        response = await self.client.get(f"/chat/{conversation_id}", headers=HTML)
        assert response.status_code == 200, response.text
        return response.text

    def conversation(self, conversation_id: str) -> Conversation:
        return self.plugin.chats._conversations[conversation_id]

    def newest(self, conversation_id: str) -> Message:
        """Return the newest answer."""
        answer = self.conversation(conversation_id).turns[-1].answer
        assert answer is not None
        return answer

    async def ended(self, conversation_id: str) -> Message:
        """Wait for the end of the newest answer and return it."""
        await until(lambda: self.conversation(conversation_id).streaming is None)
        return self.newest(conversation_id)


@dataclass(frozen=True)
class Event:
    """One server-sent event."""

    name: str
    data: Any
    id: int | None


def parse_events(text: str) -> list[Event]:
    """Return the events of a stream; comments and what is not complete are left out."""
    events = []
    for block in text.split("\n\n")[:-1]:
        if block.startswith(":"):
            continue
        fields = dict(re.findall(r"^(\w+): (.*)$", block, re.MULTILINE))
        event_id = int(fields["id"]) if "id" in fields else None
        events.append(Event(fields["event"], json.loads(fields["data"]), event_id))
    return events


def text_of(events: list[Event]) -> str:
    return "".join(event.data["text"] for event in events if event.name == "text")
