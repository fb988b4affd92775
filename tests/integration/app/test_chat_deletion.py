"""What must not be on record: texts of deleted chats, and what was said while texts were not kept."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import select

from app.db import writer as db_writer
from app.db.faults import FileFaultError
from app.db.models import ConversationRow, RequestRow, RequestTextRow
from app.plugins import ApplicationPlugin
from app.services import chat_rules, write_through
from app.services.chat_types import CONTEXT_CODE, MAX_VARIANTS
from tests.support.api import served_api, until
from tests.support.chat import HTML, Chatter
from tests.support.fake_engine import FakeEngine
from tests.support.history import fetch


@asynccontextmanager
async def chatting() -> AsyncIterator[tuple[Chatter, FakeEngine]]:
    engine = FakeEngine()
    async with served_api(engine) as api:
        await until(lambda: api.plugin.writer.status.state == "recording")
        yield Chatter(api.client, api.plugin), engine


async def read_all(plugin: ApplicationPlugin, column: Any) -> list[Any]:
    await until(lambda: plugin.hub.snapshot is None or not plugin.hub.snapshot.sequences)
    await plugin.writer.settle()
    async with plugin.database.read() as session:
        return list(await session.scalars(select(column)))


def take_no_record(plugin: ApplicationPlugin) -> bool:
    return plugin.hub.snapshot is None or plugin.hub.snapshot.step == 0


# ---- deletion


@pytest.mark.parametrize("moment", ["before its first record", "while it is answered", "after its end"])
async def test_nothing_that_was_said_in_a_deleted_chat_stays_whenever_it_is_deleted(moment: str) -> None:
    async with chatting() as (chat, engine):
        engine.runner.step_s = 0.02
        if moment == "before its first record":
            engine.runner.gate.clear()
        conversation_id = await chat.begin("a secret", max_tokens="40", stop="another", system_prompt="third")
        answer = chat.newest(conversation_id)
        match moment:
            case "before its first record":
                await until(lambda: engine.core.has_work)
                assert take_no_record(chat.plugin)
            case "while it is answered":
                await until(lambda: len(answer.text) >= 3)
            case _:
                await chat.ended(conversation_id)
        deleted = await chat.client.post(f"/chat/{conversation_id}/delete", follow_redirects=False)
        assert deleted.status_code == 303
        engine.runner.gate.set()
        await until(lambda: not engine.core.has_work and not take_no_record(chat.plugin))
        assert await read_all(chat.plugin, RequestTextRow.prompt) == []
        assert await read_all(chat.plugin, ConversationRow.id) == []
        (params,) = await read_all(chat.plugin, RequestRow.params)
        assert "another" not in params
        assert "max_tokens" in params


async def test_a_deletion_is_answered_when_it_is_written() -> None:
    async with chatting() as (chat, _):
        conversation_id = await chat.begin("a secret")
        await chat.ended(conversation_id)
        await chat.client.post(f"/chat/{conversation_id}/delete")
        assert fetch(chat.plugin.database.path, "SELECT id FROM conversations") == []


async def test_a_deletion_that_is_lost_is_said_and_the_chat_is_there_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with chatting() as (chat, _):
        conversation_id = await chat.begin("kept after all")
        await chat.ended(conversation_id)
        await chat.plugin.writer.settle()
        with monkeypatch.context() as full:
            full.setattr(db_writer, "MAX_QUEUED_PUTS", 0)
            refused = await chat.client.post(f"/chat/{conversation_id}/delete", headers=HTML)
        assert refused.status_code == 503
        assert "The history has no room for it. The deletion was not made." in refused.text
        assert conversation_id in (await chat.client.get("/chat")).text
        assert "kept after all" in await chat.read(conversation_id)
        await chat.client.post(f"/chat/{conversation_id}/delete")
        assert await read_all(chat.plugin, ConversationRow.id) == []


async def test_a_deletion_that_has_to_wait_is_said_and_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async with chatting() as (chat, _):
        conversation_id = await chat.begin("a secret")
        await chat.ended(conversation_id)
        await chat.plugin.writer.settle()
        is_locked = True
        check_file = chat.plugin.database.check_file

        def check() -> None:
            if is_locked:
                raise FileFaultError("Somebody holds the file.")
            check_file()

        monkeypatch.setattr(write_through, "WRITE_TIMEOUT_S", 0.2)
        monkeypatch.setattr(chat.plugin.database, "check_file", check)
        waits = await chat.client.post(f"/chat/{conversation_id}/delete", headers=HTML)
        assert waits.status_code == 503
        assert "Somebody holds the file. The deletion waits until it can be written." in waits.text
        assert conversation_id not in (await chat.client.get("/chat")).text
        is_locked = False
        assert await read_all(chat.plugin, ConversationRow.id) == []
        assert await read_all(chat.plugin, RequestTextRow.prompt) == []


async def test_a_chat_that_the_history_never_had_is_deleted_without_it() -> None:
    async with chatting() as (chat, _):
        chat.plugin.recorder.switch_text(is_on=False)
        conversation_id = await chat.begin("a secret")
        await chat.ended(conversation_id)
        chat.plugin.writer._state = "off"
        deleted = await chat.client.post(f"/chat/{conversation_id}/delete", follow_redirects=False)
        assert deleted.status_code == 303


async def test_a_chat_that_is_deleted_while_something_is_counted_does_not_come_back() -> None:
    async with chatting() as (chat, _):
        conversation_id = await chat.begin("x" * 40)
        await chat.ended(conversation_id)
        await chat.ask(conversation_id, "y" * 80)
        answer = await chat.ended(conversation_id)
        assert answer.stats.error_code == CONTEXT_CODE
        generations = chat.plugin._services.generations
        count, goes_on = generations.count_chat_tokens, asyncio.Event()
        counting = asyncio.Event()

        async def count_slowly(messages: list[dict[str, str]]) -> int:
            counting.set()
            await goes_on.wait()
            return await count(messages)

        generations.count_chat_tokens = count_slowly  # type: ignore[method-assign]
        going_on = asyncio.create_task(chat.act(conversation_id, answer.id, "continue"))
        await counting.wait()
        await chat.client.post(f"/chat/{conversation_id}/delete")
        goes_on.set()
        assert (await going_on).status_code == 404
        assert chat.plugin.chats._conversations == {}
        assert await read_all(chat.plugin, ConversationRow.id) == []


async def test_stopping_an_answer_of_a_chat_that_is_deleted_meanwhile_finds_nothing() -> None:
    async with chatting() as (chat, engine):
        engine.runner.gate.clear()
        conversation_id = await chat.begin()
        answer = chat.newest(conversation_id)
        responses = await asyncio.gather(
            chat.act(conversation_id, answer.id, "stop"),
            chat.client.post(f"/chat/{conversation_id}/delete", follow_redirects=False),
        )
        assert [response.status_code for response in responses] in ([303, 303], [404, 303])
        assert chat.plugin.chats._conversations == {}


# ---- leaving turns out


async def test_turns_are_left_out_only_where_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    async with chatting() as (chat, _):
        conversation_id = await chat.begin("hello")
        await chat.ended(conversation_id)
        await chat.ask(conversation_id, "more")
        answer = await chat.ended(conversation_id)
        refused = await chat.act(conversation_id, answer.id, "continue")
        assert refused.status_code == 409
        assert "does not lack room in the context" in refused.text
        assert not any(turn.is_left_out for turn in chat.conversation(conversation_id).turns)

        await chat.ask(conversation_id, "y" * 100)
        answer = await chat.ended(conversation_id)
        assert answer.stats.error_code == CONTEXT_CODE
        monkeypatch.setattr(chat_rules, "MAX_VARIANTS", 1)
        refused = await chat.act(conversation_id, answer.id, "continue")
        assert refused.status_code == 409
        assert f"at most {MAX_VARIANTS} variants" not in refused.text
        assert "at most 1 variants" in refused.text


# ---- texts that are not kept


async def test_what_was_said_while_texts_were_not_kept_is_never_recorded_by_later_questions() -> None:
    async with chatting() as (chat, _):
        kept = await chat.begin("kept")
        await chat.ended(kept)
        chat.plugin.recorder.switch_text(is_on=False)
        unkept = await chat.begin("secret1", system_prompt="secret2", stop="secret3")
        for conversation_id in (unkept, kept):
            await chat.ended(conversation_id)
            await chat.ask(conversation_id, "secret4")
            await chat.ended(conversation_id)
        chat.plugin.recorder.switch_text(is_on=True)
        for conversation_id in (unkept, kept):
            await chat.ask(conversation_id, "again")
            await chat.ended(conversation_id)
        new = await chat.begin("new")
        await chat.ended(new)
        prompts = await read_all(chat.plugin, RequestTextRow.prompt)
        assert len(prompts) == 2
        assert "secret" not in "".join([*prompts, *await read_all(chat.plugin, RequestRow.params)])
        assert "new" in prompts[1]


@pytest.mark.parametrize("kind", ["chat", "api"])
async def test_of_an_answer_that_was_partly_made_while_texts_were_not_kept_nothing_is_kept(kind: str) -> None:
    async with chatting() as (chat, engine):
        engine.runner.step_s = 0.01
        if kind == "chat":
            await chat.begin("hello", max_tokens="40")
            task = None
        else:
            body = {"model": "fake", "prompt": "hello", "max_tokens": 40}
            task = asyncio.create_task(chat.client.post("/v1/completions", json=body))
        hub = chat.plugin.hub
        await until(lambda: hub.snapshot is not None and hub.snapshot.step >= 2)
        chat.plugin.recorder.switch_text(is_on=False)
        off_at = hub.snapshot.step if hub.snapshot else 0
        await until(lambda: hub.snapshot is not None and hub.snapshot.step >= off_at + 2)
        chat.plugin.recorder.switch_text(is_on=True)
        assert hub.snapshot is not None
        assert hub.snapshot.sequences, "it goes on"
        if task is not None:
            assert (await task).status_code == 200
        await until(lambda: not engine.core.has_work)
        assert await read_all(chat.plugin, RequestTextRow.outputs) == [None]
