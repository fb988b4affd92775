"""What one client and the queue may hold: 429, and nothing left behind however requests end."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import httpx
import pytest

from tests.support.api import MODEL, ServedApi, served_api, until
from tests.support.fake_engine import FakeEngine

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": MODEL, "prompt": "hi", "max_tokens": 4},
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
}


def ask(api: ServedApi, path: str = COMPLETIONS, key: str | None = "k", **fields: Any) -> Awaitable[Any]:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    body = {**BODIES[path], **fields}
    return asyncio.create_task(api.client.post(path, json=body, headers=headers))


def num_clients(api: ServedApi) -> int:
    return api.plugin._services.generations._limits.num_clients


async def hold(api: ServedApi, count: int, **fields: Any) -> list[Awaitable[Any]]:
    """Have so many requests open that get no further until the gate is opened."""
    api.engine.runner.gate.clear()
    num_held = len(api.plugin.host._streams)
    tasks = [ask(api, **fields) for _ in range(count)]
    await until(lambda: len(api.plugin.host._streams) == num_held + count)
    return tasks


async def assert_refused(answer: Awaitable[Any], code: str) -> None:
    response = await answer
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (429, "rate_limit_error", code)
    assert int(response.headers["retry-after"]) >= 1


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_with_all_its_requests_open_is_told_to_wait(path: str, stream: bool) -> None:
    async with served_api(FakeEngine(), max_concurrency_per_key=2) as api:
        held = await hold(api, 2, path=path, n=3)
        await assert_refused(ask(api, path, stream=stream), "concurrency_limit")
        others = [ask(api, path, key="other"), ask(api, path, key=None)]
        api.engine.runner.gate.set()
        for task in [*held, *others]:
            assert (await task).status_code == 200
        again = await ask(api, path, stream=stream)
        assert again.status_code == 200
        await until(lambda: num_clients(api) == 0)


async def test_a_client_is_its_key_else_its_user_else_its_address() -> None:
    async with served_api(FakeEngine(), max_concurrency_per_key=1) as api:
        held = await hold(api, 1, key="k", user="ann")
        held += await hold(api, 1, key=None, user="ann")
        held += await hold(api, 1, key=None, user=5)
        assert num_clients(api) == 3
        for fields in ({"key": "k", "user": "ben"}, {"key": None, "user": "ann"}, {"key": None}):
            await assert_refused(ask(api, **fields), "concurrency_limit")
        held += await hold(api, 1, key=None, user="ben")
        assert b"ann" not in b"".join(api.plugin._services.generations._limits._num_open)
        api.engine.runner.gate.set()
        for task in held:
            assert (await task).status_code == 200
        assert num_clients(api) == 0


async def leave(api: ServedApi) -> None:
    """Begin to read an answer, then close the connection."""
    body = {**BODIES[CHAT], "stream": True, "max_tokens": 100}
    async with (
        httpx.AsyncClient(base_url=api.url, headers={"authorization": "Bearer k"}) as client,
        client.stream("POST", CHAT, json=body) as response,
    ):
        async for line in response.aiter_lines():
            if '"content":"' in line:
                break


async def leave_early(api: ServedApi) -> None:
    """Close the connection while a whole answer is being made."""
    task = asyncio.create_task(
        httpx.AsyncClient(base_url=api.url, headers={"authorization": "Bearer k"}).post(
            COMPLETIONS, json={**BODIES[COMPLETIONS], "max_tokens": 100}
        )
    )
    await until(lambda: api.engine.core.has_work)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def end_by_error(api: ServedApi) -> None:
    api.engine.runner.failures = 1
    assert (await ask(api)).status_code == 503


async def end_by_stop(api: ServedApi) -> None:
    text = (await ask(api, temperature=0)).json()["choices"][0]["text"]
    assert (await ask(api, temperature=0, stop=[text[1:3]])).json()["choices"][0]["finish_reason"] == "stop"


async def be_refused(api: ServedApi) -> None:
    assert (await ask(api, prompt="x" * 500)).status_code == 400
    assert (await ask(api, prompt=[94, 95])).status_code == 400


@pytest.mark.parametrize("end", [leave, leave_early, end_by_error, end_by_stop, be_refused])
async def test_however_a_request_ends_its_place_is_free_again(end: Any) -> None:
    async with served_api(FakeEngine(), max_concurrency_per_key=1) as api:
        api.engine.runner.step_s = 0.002
        await end(api)
        await until(lambda: num_clients(api) == 0)
        assert (await ask(api)).status_code == 200
        assert num_clients(api) == 0


async def test_a_server_that_stops_leaves_no_place_taken() -> None:
    async with served_api(FakeEngine(), max_concurrency_per_key=1, shutdown_timeout=0.0) as api:
        (held,) = await hold(api, 1)
        await api.plugin.host.drain(0.0)
        assert (await held).status_code == 503
        assert num_clients(api) == 0


async def test_without_a_limit_nobody_is_counted() -> None:
    async with served_api(FakeEngine()) as api:
        held = await hold(api, 4)
        assert num_clients(api) == 0
        api.engine.runner.gate.set()
        assert {(await task).status_code for task in held} == {200}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_refuses_then_drains_and_takes_again(path: str, stream: bool) -> None:
    engine = FakeEngine(max_num_seqs=1, max_waiting=2)
    async with served_api(engine) as api:
        state = engine.core.scheduler.state
        engine.runner.step_s = 0.002
        first = ask(api, path, max_tokens=90)
        await until(lambda: len(state.running) == 1)
        waiting = [ask(api, path) for _ in range(2)]
        await until(lambda: len(state.waiting) == 2)
        await assert_refused(ask(api, path, stream=stream), "queue_full")
        assert api.plugin.host.num_open == 3
        for task in (first, *waiting):
            assert (await task).status_code == 200
        assert (await ask(api, path, stream=stream)).status_code == 200
        await until(lambda: not engine.core.has_work and api.plugin.host.num_open == 0)
        engine.core.check_integrity()
