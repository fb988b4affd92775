"""Clients that leave, over a real port: what they asked for ends and its blocks are free again."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.support.api import ServedApi, served_api, until
from tests.support.fake_engine import FakeEngine

LONG = {"max_tokens": 2000, "ignore_eos": True}


def make_engine() -> FakeEngine:
    engine = FakeEngine(num_blocks=2048, max_model_len=4096, max_num_seqs=8)
    engine.runner.step_s = 0.01
    return engine


@pytest.fixture
async def api() -> AsyncIterator[ServedApi]:
    async with served_api(make_engine()) as served:
        yield served


class Watch:
    """Notes at which step the server let go of a request."""

    def __init__(self, api: ServedApi) -> None:
        self._runner = api.engine.runner
        self._release = api.plugin.host.release
        self.released_at: list[int] = []
        api.plugin.host.release = self._note  # type: ignore[method-assign]

    def _note(self, request_id: str) -> None:
        self.released_at.append(self._runner.num_steps)
        self._release(request_id)


async def assert_freed_within_two_steps(api: ServedApi, watch: Watch, num_aborted: int = 1) -> None:
    await until(lambda: not api.engine.core.has_work)
    assert api.engine.runner.num_steps - watch.released_at[0] <= 2
    snapshot = api.plugin.hub.snapshot
    assert snapshot is not None
    await until(lambda: snapshot.totals.num_aborted == num_aborted)
    assert snapshot.num_used == 0
    assert api.plugin.host.num_open == 0
    api.engine.core.check_integrity()


async def leave_stream(api: ServedApi, **fields: Any) -> None:
    """Read until the first text has come, then close the connection."""
    async with (
        httpx.AsyncClient(base_url=api.url) as client,
        client.stream(
            "POST", "/v1/chat/completions", json=api.chat_body(stream=True, **LONG, **fields)
        ) as response,
    ):
        async for line in response.aiter_lines():
            if '"content":"' in line and '"content":""' not in line:
                break


async def send_and_leave(api: ServedApi, body: dict[str, Any]) -> None:
    """Send a request and close the connection once the engine works on it."""
    content = json.dumps(body).encode()
    num_open = api.plugin.host.num_open
    reader, writer = await asyncio.open_connection(*api.address)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
    writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
    await until(lambda: api.plugin.host.num_open > num_open and api.engine.core.has_work)
    writer.close()
    await writer.wait_closed()
    del reader


async def test_leaving_a_stream_frees_its_blocks(api: ServedApi) -> None:
    watch = Watch(api)
    await leave_stream(api)
    await assert_freed_within_two_steps(api, watch)


async def test_leaving_ends_all_choices(api: ServedApi) -> None:
    watch = Watch(api)
    await leave_stream(api, n=8)
    await assert_freed_within_two_steps(api, watch, num_aborted=8)


async def test_leaving_before_a_whole_answer_frees_its_blocks(api: ServedApi) -> None:
    watch = Watch(api)
    await send_and_leave(api, api.chat_body(**LONG))
    await assert_freed_within_two_steps(api, watch)


async def test_leaving_during_prefill_is_noticed_between_chunks(api: ServedApi) -> None:
    watch = Watch(api)
    await send_and_leave(api, api.chat_body("x" * 3000, stream=True, **LONG))  # 188 chunks of 16 tokens
    await assert_freed_within_two_steps(api, watch)
    assert api.engine.runner.num_steps < 188


async def test_leaving_the_queue_touches_nobody_else() -> None:
    engine = FakeEngine(num_blocks=2048, max_model_len=4096, max_num_seqs=1)
    engine.runner.step_s = 0.005
    async with served_api(engine) as api:
        running = asyncio.create_task(
            api.client.post("/v1/chat/completions", json=api.chat_body(max_tokens=60))
        )
        await until(lambda: len(engine.core.scheduler.state.running) == 1)
        await send_and_leave(api, api.chat_body("queued", **LONG))
        response = await running
        assert response.json()["usage"]["completion_tokens"] == 60
        await until(lambda: not engine.core.has_work)
        snapshot = api.plugin.hub.snapshot
        assert snapshot is not None
        assert (snapshot.totals.num_finished, snapshot.totals.num_aborted) == (1, 1)
        # The queued one never ran: its whole life was steps of the other.
        assert engine.runner.num_steps <= 60 + 4


async def test_a_storm_of_leaving_clients_leaves_nothing_behind(api: ServedApi) -> None:
    api.engine.runner.step_s = 0.001
    for wave in range(5):
        await asyncio.gather(*(leave_stream(api, n=1 + (wave + index) % 3) for index in range(8)))
    await until(lambda: not api.engine.core.has_work)
    await until(lambda: api.plugin.host.num_open == 0)
    snapshot = api.plugin.hub.snapshot
    assert snapshot is not None
    await until(lambda: snapshot.num_used == 0)
    api.engine.core.check_integrity()


async def test_two_requests_with_one_label_do_not_meet(api: ServedApi) -> None:
    api.engine.runner.step_s = 0.0
    headers = {"x-request-id": "same"}
    responses = await asyncio.gather(
        *(
            api.client.post("/v1/chat/completions", json=api.chat_body(text, max_tokens=20), headers=headers)
            for text in ("one", "two")
        )
    )
    alone = [
        (await api.client.post("/v1/chat/completions", json=api.chat_body(text, max_tokens=20))).json()
        for text in ("one", "two")
    ]
    answers = [response.json()["choices"] for response in responses]
    assert answers == [body["choices"] for body in alone]


async def test_a_client_that_does_not_read_holds_nobody_up_and_gets_everything_in_the_end(
    api: ServedApi,
) -> None:
    api.engine.runner.step_s = 0.0
    content = json.dumps(api.chat_body(stream=True, n=4, max_tokens=1500)).encode()
    reader, writer = await asyncio.open_connection(*api.address, limit=2**10)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
    head += "Connection: close\r\nContent-Type: application/json\r\n\r\n"
    writer.write(head.encode() + content)
    await until(lambda: api.plugin.host.num_open == 1)
    await until(
        lambda: api.plugin.host.num_open == 0
    )  # the engine is done; the client has read next to nothing
    answer = await reader.read()
    writer.close()
    assert answer.count(b'"finish_reason":"length"') == 4
    assert b"data: [DONE]" in answer
