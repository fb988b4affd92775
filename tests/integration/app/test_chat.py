"""The playground over a fake engine: asking, streaming, stopping, answering again."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from app.services.chat_types import MAX_TEXT_CHARS, MessageStatus
from app.web import chat_stream
from engine.errors import ModelError
from tests.support.api import running_api, served_api, until
from tests.support.chat import Chatter, parse_events, text_of
from tests.support.fake_engine import FakeEngine

HTMX = {"hx-request": "true", "accept": "text/html"}
LONG = {"max_tokens": "60"}


@asynccontextmanager
async def chatting(engine: FakeEngine | None = None, *, wait_ready: bool = True) -> AsyncIterator[Chatter]:
    async with running_api(engine, wait_ready=wait_ready) as api:
        yield Chatter(api.client, api.plugin)


@asynccontextmanager
async def served_chat(step_s: float = 0.02) -> AsyncIterator[tuple[Chatter, FakeEngine]]:
    engine = FakeEngine()
    async with served_api(engine) as api:
        engine.runner.step_s = step_s
        yield Chatter(api.client, api.plugin), engine


async def test_an_answer_is_made_and_shown_with_its_figures() -> None:
    async with chatting() as chat:
        conversation_id = await chat.begin("hello")
        answer = await chat.ended(conversation_id)
        assert (answer.status, len(answer.text)) == (MessageStatus.COMPLETE, 12)
        stats = answer.stats
        assert (stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_output_tokens) == (12, 0, 12)
        assert (stats.first_step, stats.first_token_step, stats.last_step) == (1, 1, 12)
        page = await chat.read(conversation_id)
        for piece in ("TTFT", "prefill", "decode", "1\u201312", "max tokens reached", "Regenerate"):
            assert piece in page
        session_id = chat.plugin.hub.session_id
        assert f'href="/s/{session_id}?step=1&amp;request={answer.request_id}"' in page
        assert "http-equiv" not in page
        assert f'href="/chat/{conversation_id}"' in (await chat.client.get("/chat")).text


async def test_the_next_question_finds_the_conversation_in_the_cache() -> None:
    engine = FakeEngine(block_size=4)
    async with chatting(engine) as chat:
        conversation_id = await chat.begin("hello")
        first = await chat.ended(conversation_id)
        response = await chat.ask(conversation_id, "and then?", max_tokens="8")
        assert (response.status_code, response.headers["location"]) == (303, f"/chat/{conversation_id}")
        second = await chat.ended(conversation_id)
        assert second.stats.num_cached_tokens >= 8
        assert second.stats.num_prompt_tokens > first.stats.num_prompt_tokens + first.stats.num_output_tokens
        assert [len(turn.answers) for turn in chat.conversation(conversation_id).turns] == [1, 1]


async def test_with_scripts_asking_gives_parts_of_the_page() -> None:
    async with chatting() as chat:
        response = await chat.client.post("/chat", data={"text": "hello"}, headers=HTMX)
        assert (response.status_code, response.text) == (200, "")
        conversation_id = response.headers["hx-redirect"].removeprefix("/chat/")
        await chat.ended(conversation_id)
        response = await chat.client.post(
            f"/chat/{conversation_id}/messages", data={"text": "more"}, headers=HTMX
        )
        assert response.text.lstrip().startswith('<div id="log"')
        assert "<html" not in response.text
        assert 'hx-target="#composer-faults"' in response.text
        answer = await chat.ended(conversation_id)
        part = await chat.client.get(f"/chat/{conversation_id}/messages/{answer.id}", headers=HTMX)
        assert part.text.lstrip().startswith('<article id="turn-')
        assert part.headers["vary"] == "HX-Request"


async def test_a_stream_gives_each_character_once_wherever_it_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat_stream, "STATS_S", 0.02)
    async with served_chat() as (chat, _):
        conversation_id = await chat.begin("hello", **LONG)
        answer = chat.newest(conversation_id)
        path = f"/chat/{conversation_id}/messages/{answer.id}/stream"

        async def read(start: int, headers: dict[str, str] | None = None) -> list[str]:
            response = await chat.client.get(path, params={"from": start}, headers=headers)
            assert response.headers["content-type"].startswith("text/event-stream")
            assert response.headers["x-accel-buffering"] == "no"
            events = parse_events(response.text)
            assert [event.name for event in events].count("end") == 1
            assert events[-1].data == {"status": "complete"}
            assert {event.data["phase"] for event in events if event.name == "stats"} >= {"decode"}
            for event in events:
                if event.name == "text":
                    assert event.id is not None
            return [text_of(events), str(events[-1].id)]

        whole, again = await asyncio.gather(read(0), read(999, {"last-event-id": "7"}))
        assert len(answer.text) == 60
        assert whole == [answer.text, "60"]
        assert again == [answer.text[7:], "60"]
        late = await chat.client.get(path, params={"from": 50})
        assert text_of(parse_events(late.text)) == answer.text[50:]


async def test_a_broken_stream_goes_on_where_it_ended_and_the_answer_never_stopped() -> None:
    async with served_chat() as (chat, _):
        conversation_id = await chat.begin("hello", **LONG)
        answer = chat.newest(conversation_id)
        path = f"/chat/{conversation_id}/messages/{answer.id}/stream"
        async with chat.client.stream("GET", path) as response:
            received = ""
            async for piece in response.aiter_text():
                received += piece
                if len(text_of(parse_events(received))) >= 5:
                    break
        events = parse_events(received)
        last_id = max(event.id for event in events if event.id is not None)
        assert answer.is_streaming
        rest = await chat.client.get(path, headers={"last-event-id": str(last_id)})
        assert text_of(events) + text_of(parse_events(rest.text)) == answer.text
        assert answer.status is MessageStatus.COMPLETE


async def test_a_silent_stream_has_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_stream, "PING_S", 0.0)
    monkeypatch.setattr(chat_stream, "STATS_S", 0.01)
    async with served_chat() as (chat, engine):
        engine.runner.gate.clear()
        conversation_id = await chat.begin()
        path = f"/chat/{conversation_id}/messages/{chat.newest(conversation_id).id}/stream"
        async with chat.client.stream("GET", path) as response:
            pieces = response.aiter_bytes()
            received = b""
            while b": still here" not in received:
                received += await anext(pieces)
            engine.runner.gate.set()


async def test_an_answer_can_be_stopped_and_keeps_what_it_has() -> None:
    async with served_chat() as (chat, engine):
        conversation_id = await chat.begin("hello", **LONG)
        answer = chat.newest(conversation_id)
        await until(lambda: len(answer.text) >= 3)
        response = await chat.act(conversation_id, answer.id, "stop")
        assert response.status_code == 303
        assert answer.status is MessageStatus.STOPPED
        assert 3 <= len(answer.text) < 60
        await until(lambda: not engine.core.has_work)
        page = await chat.read(conversation_id)
        assert "stopped by you" in page
        again = await chat.act(conversation_id, answer.id, "stop")
        assert (again.status_code, answer.status) == (303, MessageStatus.STOPPED)


async def test_an_answer_that_has_not_begun_can_be_stopped() -> None:
    async with served_chat() as (chat, engine):
        engine.runner.gate.clear()
        first = await chat.begin("first")
        await until(lambda: engine.core.has_work)
        second = await chat.begin("second")
        answer = chat.newest(second)
        await chat.act(second, answer.id, "stop")
        assert (answer.status, answer.text) == (MessageStatus.STOPPED, "")
        engine.runner.gate.set()
        assert (await chat.ended(first)).status is MessageStatus.COMPLETE
        assert '<p class="hint">No text' in await chat.read(second)


async def test_regenerating_keeps_the_older_variant_within_reach() -> None:
    async with chatting() as chat:
        conversation_id = await chat.begin("hello", temperature="2", seed="1")
        first = await chat.ended(conversation_id)
        await chat.act(conversation_id, first.id, "regenerate", max_tokens="5")
        second = await chat.ended(conversation_id)
        assert (second.variant, len(second.text)) == (1, 5)
        page = await chat.read(conversation_id)
        assert "2/2" in page
        assert f"/messages/{first.id}/choose" in page
        await chat.act(conversation_id, first.id, "choose")
        page = await chat.read(conversation_id)
        assert "1/2" in page
        assert f"/messages/{second.id}/choose" in page
        await chat.ask(conversation_id, "next")
        await chat.ended(conversation_id)
        prompt = chat.conversation(conversation_id).make_prompt()
        assert prompt[1]["content"] == first.text
        refused = await chat.act(conversation_id, first.id, "regenerate")
        assert refused.status_code == 409
        assert "Only the newest question can be answered again" in refused.text


async def test_only_one_answer_is_written_at_a_time() -> None:
    async with served_chat() as (chat, engine):
        engine.runner.gate.clear()
        conversation_id = await chat.begin("hello")
        answer = chat.newest(conversation_id)
        for response in (
            await chat.ask(conversation_id, "more"),
            await chat.act(conversation_id, answer.id, "regenerate"),
            await chat.act(conversation_id, answer.id, "continue"),
            await chat.act(conversation_id, answer.id, "choose"),
        ):
            assert response.status_code == 409
            assert "An answer is being written" in response.text
        engine.runner.gate.set()
        await chat.ended(conversation_id)
        assert len(chat.conversation(conversation_id).turns) == 1


async def test_without_scripts_the_page_refreshes_while_an_answer_grows() -> None:
    async with served_chat() as (chat, engine):
        engine.runner.gate.clear()
        conversation_id = await chat.begin("hello")
        page = await chat.read(conversation_id)
        assert '<noscript><meta http-equiv="refresh" content="2"></noscript>' in page
        assert 'data-stream="/chat/' in page
        engine.runner.gate.set()
        await chat.ended(conversation_id)
        assert "http-equiv" not in await chat.read(conversation_id)


async def test_what_is_wrong_is_said_at_the_form_and_nothing_is_lost() -> None:
    async with chatting() as chat:
        response = await chat.client.post(
            "/chat", data={"text": "keep <me>", "temperature": "9"}, headers={"accept": "text/html"}
        )
        assert response.status_code == 422
        assert "temperature is 9.0; allowed: 0 to 2" in response.text
        assert "keep &lt;me&gt;" in response.text
        assert re.search(r'id="temperature"[^>]*value="9"[^>]*aria-invalid="true"', response.text)
        for fields, words in (
            ({"text": " \n"}, "text is empty"),
            ({}, "text is empty"),
            ({"text": "x" * (MAX_TEXT_CHARS + 1)}, f"allowed: {MAX_TEXT_CHARS}"),
            ({"text": "x", "system_prompt": "x" * (MAX_TEXT_CHARS + 1)}, "system_prompt has"),
        ):
            response = await chat.client.post("/chat", data=fields, headers=HTMX)
            assert response.status_code == 422
            assert response.text.startswith('<div id="composer-faults"')
            assert words in response.text
        assert chat.plugin.chats._conversations == {}


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"{}", "application/json"),
        (b"\xff\xfe", "application/x-www-form-urlencoded"),
        (b"text=%ff%fe&temperature", "application/x-www-form-urlencoded"),
        (b"nonsense", "multipart/form-data; boundary=x"),
        (b"", "multipart/form-data"),
        (b"", "text/plain"),
        (
            b'--x\r\nContent-Disposition: form-data; name="text"\r\n\r\n\xff\xfe\r\n--x--\r\n',
            "multipart/form-data; boundary=x",
        ),
        (b'--x\r\nContent-Disposition: form-data; name="te', "multipart/form-data; boundary=x"),
    ],
)
async def test_bodies_that_are_no_form_are_refused(body: bytes, content_type: str) -> None:
    async with chatting() as chat:
        response = await chat.client.post(
            "/chat", content=body, headers={"content-type": content_type}, follow_redirects=False
        )
        assert response.status_code in {303, 400, 422}, response.text


async def test_whatever_the_fields_may_hold_arrives_however_it_is_written() -> None:
    async with chatting() as chat:
        most = "\U0001f600" * MAX_TEXT_CHARS
        stop = "\n".join(["\U0001f600" * 256] * 16)
        conversation_id = await chat.begin(most, system_prompt=most, stop=stop)
        assert chat.conversation(conversation_id).system_prompt == most
        await chat.ended(conversation_id)
        response = await chat.ask(conversation_id, most + "x", system_prompt=most)
        assert (response.status_code, f"allowed: {MAX_TEXT_CHARS}" in response.text) == (422, True)


async def test_unknown_conversations_and_messages_are_not_found() -> None:
    async with chatting() as chat:
        conversation_id = await chat.begin()
        await chat.ended(conversation_id)
        await until(lambda: chat.plugin.database.is_open)
        for path in ("/chat/unknown", f"/chat/{conversation_id}/messages/x", "/chat/note?conversation=x"):
            response = await chat.client.get(path, headers={"accept": "text/html"})
            assert response.status_code == 404, path
        assert (await chat.client.get(f"/chat/{conversation_id}/messages/x/stream")).status_code == 404
        assert (await chat.act(conversation_id, "x", "stop")).status_code == 404
        assert (await chat.ask("unknown", "hello")).status_code == 404
        answer = chat.newest(conversation_id)
        assert (await chat.act(conversation_id, answer.id, "explode")).status_code == 404
        stream = f"/chat/{conversation_id}/messages/{answer.id}/stream?from=x"
        response = await chat.client.get(stream)
        assert (response.status_code, "from must be a whole number" in response.text) == (400, True)


async def test_while_the_model_loads_the_chat_says_so_and_can_try_again() -> None:
    engine = FakeEngine()
    engine.load_gate.clear()
    async with chatting(engine, wait_ready=False) as chat:
        assert "The model is still loading" in (await chat.client.get("/chat")).text
        conversation_id = await chat.begin()
        answer = await chat.ended(conversation_id)
        assert answer.status is MessageStatus.FAILED
        page = await chat.read(conversation_id)
        assert "The model is still loading (" in page
        assert "Try again" in page
        assert f'href="/r/{answer.request_id}"' not in page  # the engine never had it
        engine.load_gate.set()
        await until(lambda: chat.plugin.host.config is not None)
        await chat.act(conversation_id, answer.id, "regenerate")
        assert (await chat.ended(conversation_id)).status is MessageStatus.COMPLETE


async def test_a_model_that_cannot_be_loaded_is_named_in_the_chat() -> None:
    engine = FakeEngine()
    engine.load_error = ModelError("The file <ends> too early.")
    async with chatting(engine, wait_ready=False) as chat:
        await until(lambda: chat.plugin.host.status == "failed")
        conversation_id = await chat.begin()
        await chat.ended(conversation_id)
        assert "The file &lt;ends&gt; too early." in await chat.read(conversation_id)


async def test_a_failing_step_ends_the_answer_with_a_word_and_what_it_had() -> None:
    async with served_chat() as (chat, engine):
        conversation_id = await chat.begin("hello", **LONG)
        answer = chat.newest(conversation_id)
        await until(lambda: len(answer.text) >= 3)
        engine.runner.failures = 1
        await chat.ended(conversation_id)
        assert answer.status is MessageStatus.INTERRUPTED
        page = await chat.read(conversation_id)
        assert "injected fault" not in page
        assert "Try again" in page
        assert answer.error is not None
        assert len(answer.text) >= 3


async def test_a_template_that_refuses_is_said_in_the_chat() -> None:
    async with chatting() as chat:
        conversation_id = await chat.begin("template error")
        answer = await chat.ended(conversation_id)
        assert answer.error == "The template refuses these messages."
        await chat.ask(conversation_id, "hello")
        answer = await chat.ended(conversation_id)
        assert answer.status is MessageStatus.COMPLETE
        page = await chat.read(conversation_id)
        assert "Not sent to the model: it has no answer" in page


async def test_when_the_server_stops_the_answer_says_so() -> None:
    engine = FakeEngine()
    async with served_api(engine, shutdown_timeout=0.0) as api:
        engine.runner.step_s = 0.02
        chat = Chatter(api.client, api.plugin)
        conversation_id = await chat.begin("hello", **LONG)
        answer = chat.newest(conversation_id)
        await until(lambda: len(answer.text) >= 3)
        path = f"{api.url}/chat/{conversation_id}/messages/{answer.id}/stream"
        async with httpx.AsyncClient(timeout=20) as client, client.stream("GET", path) as response:
            api.server.should_exit = True
            received = "".join([piece async for piece in response.aiter_text()])
    assert parse_events(received)[-1].data == {"status": "interrupted"}
    assert answer.status is MessageStatus.INTERRUPTED
    assert answer.error == "The server is shutting down; the answer is not complete."
    assert text_of(parse_events(received)) == answer.text


async def test_a_conversation_can_be_renamed_and_deleted() -> None:
    async with served_chat() as (chat, engine):
        conversation_id = await chat.begin("hello", **LONG)
        renamed = await chat.client.post(f"/chat/{conversation_id}/rename", data={"title": " A  <b> "})
        assert (renamed.status_code, chat.conversation(conversation_id).title) == (303, "A <b>")
        assert "A &lt;b&gt;" in await chat.read(conversation_id)
        refused = await chat.client.post(f"/chat/{conversation_id}/rename", data={"title": " "})
        assert refused.status_code == 400
        answer = chat.newest(conversation_id)
        await until(lambda: len(answer.text) >= 1)
        deleted = await chat.client.post(f"/chat/{conversation_id}/delete")
        assert (deleted.status_code, deleted.headers["location"]) == (303, "/chat")
        await until(lambda: not engine.core.has_work)
        gone = await chat.client.get(f"/chat/{conversation_id}", headers={"accept": "text/html"})
        assert gone.status_code == 404
        assert conversation_id not in (await chat.client.get("/chat")).text
