"""The playground's pages and what its forms do: with scripts parts of a page, without them a redirect."""

import re
from dataclasses import dataclass
from typing import Any, Final

from litestar import Controller, Request, Response, get, post
from litestar.di import NamedDependency
from litestar.exceptions import ClientException, NotFoundException
from litestar.params import FromPath
from litestar.response import Redirect, Template

from app.services.chat_rules import ChatStateError
from app.services.chat_types import ChatParams, Conversation
from app.services.chats import ChatService
from app.web.chat_context import make_answer_view, make_conversation_view
from app.web.chat_forms import (
    MAX_FORM_BYTES,
    PARAM_FIELDS,
    ComposerForm,
    fill_form,
    make_form,
    parse_form,
)
from app.web.chat_stream import ChatStream
from app.web.form_data import read_form
from app.web.markdown import MarkdownRenderer
from app.web.page_context import PageFrame
from engine.errors import RequestError

HEADS_SHOWN: Final = 50
MAX_HEADS_SHOWN: Final = 1000
_MAX_DIGITS: Final = 9
_DIGITS: Final = re.compile(r"[0-9]+", re.ASCII)

AnyRequest = Request[Any, Any, Any]


@dataclass(frozen=True)
class ChatDesk:
    """What the handlers need; injected as `chat_desk`."""

    chats: ChatService
    renderer: MarkdownRenderer
    frame: PageFrame

    async def render_page(
        self,
        request: AnyRequest,
        conversation: Conversation | None,
        form: ComposerForm,
        status_code: int = 200,
    ) -> Template:
        """Return the whole page."""
        view = None if conversation is None else await make_conversation_view(conversation, self.renderer)
        shown = _read_count(request, "show", HEADS_SHOWN)
        page = self.frame.render_page(
            request,
            "pages/chat.html",
            "/chat",
            {
                "conversation": view,
                "form": form,
                "param_fields": PARAM_FIELDS,
                "heads": await self.chats.list_heads(min(shown, MAX_HEADS_SHOWN)),
                "num_shown": shown,
                "keeps_text": self.chats.keeps_text,
            },
        )
        page.status_code = status_code
        return page

    async def render_log(self, conversation: Conversation) -> Template:
        """Return all messages of a conversation, and the composer as it is now."""
        view = await make_conversation_view(conversation, self.renderer)
        form = make_form(conversation.params, conversation.system_prompt)
        context = {"conversation": view, "form": form, "keeps_text": self.chats.keeps_text}
        return self.frame.render_part("partials/_chat_update.html", context)

    async def answer(self, request: AnyRequest, conversation: Conversation) -> Response[Any]:
        """Show what a form did: a part for htmx, the page for browsers without scripts."""
        if _is_htmx(request):
            return await self.render_log(conversation)
        return Redirect(f"/chat/{conversation.id}", status_code=303)

    async def refuse(
        self, request: AnyRequest, conversation: Conversation | None, form: ComposerForm, error: RequestError
    ) -> Response[Any]:
        """Show the form again with what is wrong."""
        form = form.with_error(error)
        if not _is_htmx(request):
            return await self.render_page(request, conversation, form, status_code=_status_of(error))
        part = self.frame.render_part("partials/_composer_faults.html", {"form": form})
        part.status_code = _status_of(error)
        return part


class ChatController(Controller):
    """`/chat`."""

    path = "/chat"
    include_in_schema = False
    request_max_body_size = MAX_FORM_BYTES

    @get("/", name="chat")
    async def new_chat(self, request: AnyRequest, chat_desk: NamedDependency[ChatDesk]) -> Template:
        """Show an empty chat beside the conversations."""
        return await chat_desk.render_page(request, None, make_form(ChatParams()))

    @post("/", name="chat-create")
    async def create(self, request: AnyRequest, chat_desk: NamedDependency[ChatDesk]) -> Response[Any]:
        """Begin a conversation and go there."""
        form = fill_form(await read_form(request), make_form(ChatParams()))
        try:
            conversation = chat_desk.chats.create(parse_form(form))
        except RequestError as error:
            return await chat_desk.refuse(request, None, form, error)
        address = f"/chat/{conversation.id}"
        if _is_htmx(request):
            return Response(b"", status_code=200, headers={"HX-Redirect": address})
        return Redirect(address, status_code=303)

    @get("/{conversation_id:str}", name="chat-page")
    async def show(
        self, request: AnyRequest, conversation_id: FromPath[str], chat_desk: NamedDependency[ChatDesk]
    ) -> Template:
        """Show a conversation; an answer that is being written goes on there."""
        conversation = await chat_desk.chats.get(conversation_id)
        form = make_form(conversation.params, conversation.system_prompt)
        return await chat_desk.render_page(request, conversation, form)

    @get("/note", name="chat-note")
    async def note(self, request: AnyRequest, chat_desk: NamedDependency[ChatDesk]) -> Template:
        """Return the line that says whether `?conversation=` is stored."""
        conversation_id = request.query_params.get("conversation")
        conversation = None if conversation_id is None else await chat_desk.chats.get(conversation_id)
        context = {"conversation": conversation, "keeps_text": chat_desk.chats.keeps_text}
        return chat_desk.frame.render_part("partials/_store_note.html", context)

    @post("/{conversation_id:str}/messages", name="chat-ask")
    async def ask(
        self, request: AnyRequest, conversation_id: FromPath[str], chat_desk: NamedDependency[ChatDesk]
    ) -> Response[Any]:
        """Ask the next question."""
        conversation = await chat_desk.chats.get(conversation_id)
        base = make_form(conversation.params, conversation.system_prompt)
        form = fill_form(await read_form(request), base)
        try:
            conversation = await chat_desk.chats.ask(conversation_id, parse_form(form))
        except RequestError as error:
            return await chat_desk.refuse(request, conversation, form, error)
        return await chat_desk.answer(request, conversation)

    @post("/{conversation_id:str}/messages/{message_id:str}/{action:str}", name="chat-act")
    async def act(
        self,
        request: AnyRequest,
        conversation_id: FromPath[str],
        message_id: FromPath[str],
        action: FromPath[str],
        chat_desk: NamedDependency[ChatDesk],
    ) -> Response[Any]:
        """Stop, regenerate, continue or choose an answer."""
        conversation, _, _ = await chat_desk.chats.find(conversation_id, message_id)
        base = make_form(conversation.params, conversation.system_prompt)
        form = fill_form(await read_form(request), base)
        chats = chat_desk.chats
        try:
            match action:
                case "stop":
                    conversation = await chats.stop_answer(conversation_id, message_id)
                case "regenerate":
                    conversation = await chats.regenerate(conversation_id, message_id, parse_form(form))
                case "continue":
                    conversation = await chats.continue_without_oldest(conversation_id, message_id)
                case "choose":
                    conversation = await chats.choose(conversation_id, message_id)
                case _:
                    raise NotFoundException("Messages can be stopped, regenerated, continued and chosen.")
        except RequestError as error:
            return await chat_desk.refuse(request, conversation, form, error)
        return await chat_desk.answer(request, conversation)

    @get("/{conversation_id:str}/messages/{message_id:str}", name="chat-message")
    async def message(
        self,
        conversation_id: FromPath[str],
        message_id: FromPath[str],
        chat_desk: NamedDependency[ChatDesk],
    ) -> Template:
        """Return the turn that a message is in."""
        conversation, turn, _ = await chat_desk.chats.find(conversation_id, message_id)
        view = await make_answer_view(conversation, turn, chat_desk.renderer)
        return chat_desk.frame.render_part(
            "partials/_turn.html", {"conversation": {"id": conversation.id}, "turn": view}
        )

    @get("/{conversation_id:str}/messages/{message_id:str}/stream", name="chat-stream")
    async def stream(
        self,
        request: AnyRequest,
        conversation_id: FromPath[str],
        message_id: FromPath[str],
        chat_desk: NamedDependency[ChatDesk],
    ) -> Response[Any]:
        """Send an answer as it grows, from `?from=` characters or those of Last-Event-ID on."""
        _, _, message = await chat_desk.chats.find(conversation_id, message_id)
        start = _read_count(request, "from", 0)
        last_id = request.headers.get("last-event-id", "")
        if len(last_id) <= _MAX_DIGITS and _DIGITS.fullmatch(last_id):
            start = int(last_id)
        return ChatStream(message, chat_desk.chats.get_answer(message_id), start)

    @post("/{conversation_id:str}/rename", name="chat-rename")
    async def rename(
        self, request: AnyRequest, conversation_id: FromPath[str], chat_desk: NamedDependency[ChatDesk]
    ) -> Response[Any]:
        """Give a conversation another title."""
        conversation = await chat_desk.chats.get(conversation_id)
        fields = await read_form(request)
        await chat_desk.chats.rename(conversation.id, str(fields.get("title", "")))
        return Redirect(f"/chat/{conversation.id}", status_code=303)

    @post("/{conversation_id:str}/delete", name="chat-delete")
    async def delete(
        self, conversation_id: FromPath[str], chat_desk: NamedDependency[ChatDesk]
    ) -> Response[Any]:
        """Forget a conversation."""
        await chat_desk.chats.delete(conversation_id)
        return Redirect("/chat", status_code=303)


def _is_htmx(request: AnyRequest) -> bool:
    return request.headers.get("hx-request") == "true"


def _status_of(error: RequestError) -> int:
    return 409 if isinstance(error, ChatStateError) else 422


def _read_count(request: AnyRequest, name: str, default: int) -> int:
    """Return a whole number of the address; 400 naming it if it is none."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if len(text) > _MAX_DIGITS or not _DIGITS.fullmatch(text):
        raise ClientException(f"{name} must be a whole number, such as {default}.")
    return int(text)
