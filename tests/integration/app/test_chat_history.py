"""Chats and the history: stored, found again, not stored, too long for the context; and hostile texts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from litestar.testing import AsyncTestClient
from sqlalchemy import func, select

from app.asgi import create_app
from app.db.models import ConversationRow, MessageRow, RequestTextRow
from app.plugins import ApplicationPlugin
from app.services import chats
from app.services.chat_types import CONTEXT_CODE, ChatParams, Conversation, MessageStatus
from app.settings import Settings
from tests.support.api import BASE_URL, until
from tests.support.chat import HTML, Chatter
from tests.support.fake_engine import FakeEngine

ANSWER_TOKENS = 12


@asynccontextmanager
async def chatting(data_dir: Path, **settings: Any) -> AsyncIterator[Chatter]:
    """Run the application once over a folder."""
    app = create_app(
        Settings(served_model_name="fake", data_dir=data_dir, **settings), FakeEngine(block_size=4).load
    )
    plugin = app.plugins.get(ApplicationPlugin)
    async with AsyncTestClient(app=app, base_url=BASE_URL) as client:
        await until(lambda: plugin.host.config is not None and plugin.writer.status.state != "opening")
        yield Chatter(client, plugin)


def facts_of(conversation: Conversation) -> list[dict[str, Any]]:
    return [vars(message) for message in conversation.messages]


async def test_a_conversation_is_the_same_after_a_restart(tmp_path: Path) -> None:
    async with chatting(tmp_path) as chat:
        conversation_id = await chat.begin("first", temperature="1.5", system_prompt="be kind", stop="xyzzy")
        first = await chat.ended(conversation_id)
        await chat.act(conversation_id, first.id, "regenerate")
        await chat.ended(conversation_id)
        await chat.act(conversation_id, first.id, "choose")
        await chat.ask(conversation_id, "second")
        await chat.ended(conversation_id)
        before = chat.conversation(conversation_id)
        facts, prompt = facts_of(before), before.make_prompt()
    async with chatting(tmp_path) as chat:
        assert conversation_id in (await chat.client.get("/chat")).text
        page = await chat.read(conversation_id)
        after = chat.conversation(conversation_id)
        assert facts_of(after) == facts
        assert after.make_prompt() == prompt
        assert (after.title, after.system_prompt) == ("first", "be kind")
        assert after.params == ChatParams(temperature=1.5, max_tokens=ANSWER_TOKENS, stop=("xyzzy",))
        assert "3</b> changed" not in page
        assert "4</b> changed" in page
        await chat.ask(conversation_id, "third")
        assert (await chat.ended(conversation_id)).status is MessageStatus.COMPLETE


async def test_a_deleted_conversation_stays_deleted(tmp_path: Path) -> None:
    async with chatting(tmp_path) as chat:
        kept, deleted = await chat.begin("kept"), await chat.begin("gone")
        await chat.ended(kept)
        await chat.ended(deleted)
        await chat.plugin.writer.settle()
        await chat.client.post(f"/chat/{deleted}/delete")
        await chat.plugin.writer.settle()
        async with chat.plugin.database.read() as session:
            prompts = list(await session.scalars(select(RequestTextRow.prompt)))
        assert len(prompts) == 1
        assert "kept" in prompts[0]
        assert deleted not in (await chat.client.get("/chat")).text
    async with chatting(tmp_path) as chat:
        text = (await chat.client.get("/chat")).text
        assert kept in text
        assert deleted not in text
        assert (await chat.client.get(f"/chat/{deleted}", headers=HTML)).status_code == 404


async def test_an_answer_that_was_cut_by_the_end_of_the_server_says_so(tmp_path: Path) -> None:
    async with chatting(tmp_path) as chat:
        conversation_id = await chat.begin("first")
        await chat.ended(conversation_id)
        conversation = chat.conversation(conversation_id)
        await chat.plugin.writer.settle()
        answer = conversation.turns[0].answer
        assert answer is not None
        answer.status, answer.text = MessageStatus.STREAMING, "half of"
        chat.plugin.chats._save(conversation, [answer])
    async with chatting(tmp_path) as chat:
        page = await chat.read(conversation_id)
        assert "half of" in page
        assert f'href="/r/{answer.request_id}"' in page
        assert "The server ended while this answer was being written." in page
        assert "Try again" in page


async def test_with_texts_off_nothing_of_a_chat_is_stored_and_the_page_says_so(tmp_path: Path) -> None:
    async with chatting(tmp_path, record_text="off") as chat:
        assert "Chats are not stored now" in (await chat.client.get("/chat")).text
        conversation_id = await chat.begin("a secret")
        await chat.ended(conversation_id)
        assert "Chats are not stored now" in await chat.read(conversation_id)
        chat.plugin.recorder.switch_text(is_on=True)
        await chat.ask(conversation_id, "another secret")
        await chat.ended(conversation_id)
        assert "This chat is not stored, or not all of it" in await chat.read(conversation_id)
        assert (
            "This chat is not stored"
            in (await chat.client.get(f"/chat/note?conversation={conversation_id}")).text
        )
        assert conversation_id in (await chat.client.get("/chat")).text
        await chat.plugin.writer.settle()
        async with chat.plugin.database.read() as session:
            rows = [
                await session.scalar(select(func.count()).select_from(table))
                for table in (ConversationRow, MessageRow)
            ]
        assert rows == [0, 0]


async def test_a_stored_chat_is_stored_up_to_where_texts_were_switched_off(tmp_path: Path) -> None:
    async with chatting(tmp_path) as chat:
        conversation_id = await chat.begin("first")
        await chat.ended(conversation_id)
        chat.plugin.recorder.switch_text(is_on=False)
        await chat.ask(conversation_id, "a secret")
        await chat.ended(conversation_id)
        chat.plugin.recorder.switch_text(is_on=True)
        await chat.ask(conversation_id, "third")
        await chat.ended(conversation_id)
        assert len(chat.conversation(conversation_id).turns) == 3
    async with chatting(tmp_path) as chat:
        page = await chat.read(conversation_id)
        assert "secret" not in page
        assert [turn.question.text for turn in chat.conversation(conversation_id).turns] == ["first"]


async def test_without_a_history_chats_work_and_say_that_they_are_not_stored(tmp_path: Path) -> None:
    (tmp_path / "history.db").write_bytes(b"this is no database" * 100)
    async with chatting(tmp_path) as chat:
        conversation_id = await chat.begin("hello")
        assert (await chat.ended(conversation_id)).status is MessageStatus.COMPLETE
        page = await chat.read(conversation_id)
        assert "This chat is not stored" in page
        assert "Older conversations cannot be shown" in page
        await chat.ask(conversation_id, "more")
        assert (await chat.ended(conversation_id)).status is MessageStatus.COMPLETE
        unknown = await chat.client.get("/chat/unknown", headers=HTML)
        assert unknown.status_code == 503
        assert "history" in unknown.text


async def test_memory_holds_a_bounded_number_of_chats_and_finds_the_others_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chats, "MAX_CONVERSATIONS", 3)
    async with chatting(tmp_path) as chat:
        ids = []
        for number in range(5):
            ids.append(await chat.begin(f"chat {number}"))
            await chat.ended(ids[-1])
        await chat.plugin.writer.settle()
        assert len(chat.plugin.chats._conversations) == 3
        assert ids[0] not in chat.plugin.chats._conversations
        assert "chat 0" in await chat.read(ids[0])
        text = (await chat.client.get("/chat?show=2")).text
        assert text.count('class="head-title"') == 2
        assert "?show=4" in text


# ---- the context


async def test_a_chat_that_outgrows_the_context_says_so_and_goes_on_without_its_oldest_turns(
    tmp_path: Path,
) -> None:
    async with chatting(tmp_path) as chat:
        conversation_id = await chat.begin("x" * 10, system_prompt="kind")
        await chat.ended(conversation_id)
        for number in range(10):
            await chat.ask(conversation_id, f"{number}" * 10)
            answer = await chat.ended(conversation_id)
            if answer.status is MessageStatus.FAILED:
                break
        assert answer.stats.error_code == CONTEXT_CODE
        assert answer.error is not None
        page = await chat.read(conversation_id)
        assert "The conversation has outgrown the context. The prompt has " in page
        assert "limited to 128" in page
        assert "Continue without the oldest turns" in page
        num_turns = len(chat.conversation(conversation_id).turns)
        await chat.act(conversation_id, answer.id, "continue")
        answer = await chat.ended(conversation_id)
        assert (answer.status, answer.variant) == (MessageStatus.COMPLETE, 1)
        conversation = chat.conversation(conversation_id)
        left_out = [turn.is_left_out for turn in conversation.turns]
        num_left_out = sum(left_out)
        assert left_out == [True] * num_left_out + [False] * (num_turns - num_left_out)
        assert 1 <= num_left_out < num_turns - 1
        # As few as possible: with one turn more there would not have been room for the answer.
        turn = conversation.turns[num_left_out - 1]
        for message in turn.messages:
            message.is_left_out = False
        generations = chat.plugin._services.generations
        assert await generations.count_chat_tokens(conversation.make_prompt()) + ANSWER_TOKENS > 128
        turn.leave_out()
        assert conversation.make_prompt()[0] == {"role": "system", "content": "kind"}
        page = await chat.read(conversation_id)
        assert "Not sent to the model: the context is full" in page
        assert f"{num_left_out} of {num_turns} turns are left out" in page
    async with chatting(tmp_path) as chat:
        await chat.read(conversation_id)
        assert [turn.is_left_out for turn in chat.conversation(conversation_id).turns] == left_out


async def test_an_answer_that_ends_where_the_context_ends_says_so(tmp_path: Path) -> None:
    async with chatting(tmp_path) as chat:
        conversation_id = await chat.begin("x" * 30)
        await chat.ended(conversation_id)
        await chat.ask(conversation_id, "y" * 30, max_tokens="500")
        answer = await chat.ended(conversation_id)
        assert answer.stats.is_context_full
        page = await chat.read(conversation_id)
        assert "the context is full" in page
        assert "Continue without the oldest turns" in page
        await chat.act(conversation_id, answer.id, "continue")
        again = await chat.ended(conversation_id)
        assert len(again.text) > len(answer.text)
        assert "Continue without the oldest turns" not in await chat.read(conversation_id)


async def test_a_question_that_is_too_long_by_itself_offers_nothing_that_cannot_help(tmp_path: Path) -> None:
    async with chatting(tmp_path) as chat:
        conversation_id = await chat.begin("x" * 200)
        answer = await chat.ended(conversation_id)
        assert answer.stats.error_code == CONTEXT_CODE
        page = await chat.read(conversation_id)
        assert "This is longer than the context. The prompt has " in page
        assert "Continue without the oldest turns" not in page
        refused = await chat.act(conversation_id, answer.id, "continue")
        assert refused.status_code == 409
        assert "There is no older turn to leave out" in refused.text
        await chat.ask(conversation_id, "hello")
        await chat.ended(conversation_id)
        await chat.ask(conversation_id, "x" * 200)
        answer = await chat.ended(conversation_id)
        refused = await chat.act(conversation_id, answer.id, "continue")
        assert refused.status_code == 409
        assert "Even without all older turns it does not fit into 128 tokens" in refused.text


async def test_a_turn_is_sent_when_the_variant_that_is_shown_has_text_and_the_page_says_which_way_it_is(
    tmp_path: Path,
) -> None:
    async with chatting(tmp_path) as chat:
        conversation_id = await chat.begin("first", temperature="0")
        full = await chat.ended(conversation_id)
        await chat.act(conversation_id, full.id, "regenerate", stop=full.text[:1])
        empty = await chat.ended(conversation_id)
        assert empty.text == ""
        await chat.ask(conversation_id, "second", stop="")
        await chat.ended(conversation_id)
        note = "Not sent to the model: the variant that is shown has no text"

        def contents() -> list[str]:
            return [message["content"] for message in chat.conversation(conversation_id).make_prompt()]

        assert contents() == ["second"]
        assert note in await chat.read(conversation_id)
        await chat.act(conversation_id, full.id, "choose")
        assert contents() == ["first", full.text, "second"]
        page = await chat.read(conversation_id)
        assert "Not sent to the model" not in page
        assert "left out" not in page
        await chat.act(conversation_id, empty.id, "choose")
        assert contents() == ["second"]
        page = await chat.read(conversation_id)
        assert note in page
        assert "1 of 2 turns are left out" in page


# ---- hostile texts

PAYLOADS = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</textarea></div><svg onload=alert(1)>",
    "[x](javascript:alert(1))",
    "{{ 7 * 7 }}{% raw %}",
    "<hx-partial hx-target='body'>x</hx-partial>",
)


async def test_whatever_is_typed_or_answered_stays_text(tmp_path: Path) -> None:
    everything = " ".join(PAYLOADS)
    async with chatting(tmp_path) as chat:
        conversation_id = await chat.begin(everything[:60], system_prompt=everything, stop="<b onclick=x>")
        answer = await chat.ended(conversation_id)
        conversation = chat.conversation(conversation_id)
        conversation.title = everything
        conversation.turns[0].question.text = everything
        for text, error in ((everything, everything), (f"```{everything}\n{everything}\n```", None)):
            answer.text, answer.error = text, error
            for path in (f"/chat/{conversation_id}", f"/chat/{conversation_id}/messages/{answer.id}"):
                page = (await chat.client.get(path)).text
                assert "<script>alert" not in page
                assert "<img" not in page
                assert "<svg onload" not in page
                assert "<b onclick" not in page
                assert 'href="javascript' not in page
                assert "{{ 7 * 7 }}" in page
                assert "<hx-partial hx-target='body'" not in page
        chat.plugin.chats._save(conversation, list(conversation.messages))
    async with chatting(tmp_path) as chat:
        page = await chat.read(conversation_id)
        assert "<script>alert" not in page
        assert "&lt;script&gt;alert(1)" in page


async def test_questions_that_come_at_once_are_answered_one_by_one_or_refused(tmp_path: Path) -> None:
    async with chatting(tmp_path) as chat:
        conversation_id = await chat.begin("hello")
        await chat.ended(conversation_id)
        responses = await asyncio.gather(*(chat.ask(conversation_id, f"q{n}") for n in range(4)))
        codes = [response.status_code for response in responses]
        assert set(codes) <= {303, 409}
        await chat.ended(conversation_id)
        turns = chat.conversation(conversation_id).turns
        assert len(turns) == 1 + codes.count(303)
        assert [message.position for turn in turns for message in turn.messages] == list(
            range(2 * len(turns))
        )
