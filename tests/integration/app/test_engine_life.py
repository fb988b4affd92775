"""Loading, failing, freezing and stopping, over a real port."""

import asyncio
from typing import Any

import pytest

import app.engine_host
import app.web.openai_responses
from app.engine_host import EngineHost, StartProgress
from app.engine_thread import GIVEN_UP, STEP_FAILED
from engine.errors import ModelError
from tests.support.api import MODEL, begin_streams, read_events, served_api, until
from tests.support.fake_engine import FakeEngine


def make_engine(**config: Any) -> FakeEngine:
    return FakeEngine(**{"num_blocks": 2048, "max_model_len": 4096, "max_num_seqs": 8, **config})


async def test_while_loading_everything_answers_and_says_how_far_it_is() -> None:
    engine = make_engine()
    engine.load_gate.clear()
    async with served_api(engine) as api:
        await until(lambda: api.plugin.host.progress != StartProgress())
        for response in (
            await api.client.post("/v1/chat/completions", json=api.chat_body()),
            await api.client.get("/v1/models"),
        ):
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (503, "model_loading")
            assert int(response.headers["retry-after"]) >= 1
            assert "weights, 25%" in error["message"]
        assert (await api.client.get("/health/live")).status_code == 200
        ready = await api.client.get("/health/ready")
        assert (ready.status_code, ready.json()["reason"]) == (503, "loading")
        assert ready.json()["progress"] == {"stage": "weights", "fraction": 0.25}
        assert (await api.client.get("/health")).json()["status"] == "loading"
        assert (await api.client.get("/live")).status_code == 200
        assert (await api.client.post("/v1/chat/completions", json={})).status_code == 400
        engine.load_gate.set()
        await until(lambda: api.plugin.host.config is not None)
        assert (await api.client.get("/health/ready")).status_code == 200
        assert (await api.client.get("/v1/models")).json()["data"][0]["id"] == MODEL


async def test_progress_is_told_from_the_very_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    engine.load_gate.clear()
    # As long as torch is being imported, the load reports nothing.
    monkeypatch.setattr(EngineHost, "_on_progress", lambda host, progress: None)
    async with served_api(engine) as api:
        start = {"stage": "starting", "fraction": 0.0}
        for path in ("/health/ready", "/health", "/api/engine/state"):
            assert (await api.client.get(path)).json()["progress"] == start
        assert "starting · 0%" in (await api.client.get("/live")).text
        assert "(starting, 0%)" in (await api.client.get("/v1/models")).json()["error"]["message"]


async def test_stopping_while_loading_abandons_the_load() -> None:
    engine = make_engine()
    engine.load_gate.clear()
    async with served_api(engine) as api:
        await until(lambda: api.plugin.host.progress != StartProgress())
        api.server.should_exit = True
        await until(lambda: not api.plugin.host.has_thread)
        assert not engine.load_gate.is_set()


async def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    engine = make_engine()
    engine.load_error = ModelError("The file is cut off.")
    engine.load_gate.clear()
    async with served_api(engine) as api:
        engine.load_gate.set()
        await until(lambda: api.server.should_exit)
        assert api.server.load_error == "The file is cut off."


async def test_a_failed_step_tells_every_stream_and_the_engine_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_engine()
    engine.runner.step_s = 0.005
    async with served_api(engine) as api:
        streams = await begin_streams(api, 5)
        whole = asyncio.create_task(
            api.client.post("/v1/chat/completions", json=api.chat_body(max_tokens=3000))
        )
        await until(lambda: len(engine.core.scheduler.state.running) == 6)
        engine.runner.failures = 1
        for text in await asyncio.gather(*streams):
            assert "[DONE]" not in text
            error = read_events(text)[-1]["error"]
            assert (error["code"], error["type"]) == ("engine_error", "server_error")
            assert error["message"] == STEP_FAILED
        response = await whole
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_error")
        state = (await api.client.get("/api/engine/state")).json()
        assert state["counts"]["free"] == state["counts"]["total"]
        assert (await api.client.get("/health/ready")).status_code == 200
        short = await begin_streams(api, 1, max_tokens=5)
        assert read_events(await short[0])[-1] == "[DONE]"
        # What went wrong is for the operator.
        assert "injected fault" in caplog.text


async def test_three_failures_in_a_row_end_the_engine_but_not_the_server() -> None:
    engine = make_engine()
    async with served_api(engine) as api:
        engine.runner.failures = 3
        for _ in range(3):
            response = await api.client.post("/v1/chat/completions", json=api.chat_body(max_tokens=3))
            assert response.json()["error"]["code"] == "engine_error"
        await until(lambda: api.plugin.host.status == "failed")
        refused = await api.client.post("/v1/chat/completions", json=api.chat_body())
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_failed")
        for path in ("/health/live", "/health/ready"):
            health = await api.client.get(path)
            assert health.status_code == 503
            assert "failed 3 times within a minute; the log says why" in health.json()["reason"]
            assert "injected fault" not in health.text
        assert api.plugin.hub.status == "failed"
        assert (await api.client.get("/live")).status_code == 200


async def test_an_engine_that_cannot_start_over_leaves_no_request_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(max_num_seqs=2)
    engine.runner.step_s = 0.005
    async with served_api(engine) as api:
        streams = await begin_streams(api, 5)  # three of them wait
        await until(lambda: len(engine.core.scheduler.state.waiting) == 3)
        monkeypatch.setattr(engine.runner, "reset", lambda: 1 / 0)
        engine.runner.failures = 1
        for text in await asyncio.gather(*streams):
            assert read_events(text)[-1]["error"]["code"] == "engine_error"
        await until(lambda: api.plugin.host.status == "failed")
        state = (await api.client.get("/api/engine/state")).json()
        assert (state["running"], state["waiting"]) == ([], [])
        assert state["counts"]["free"] == state["counts"]["total"]
        assert state["totals"]["num_failed"] == 5
        health = await api.client.get("/health/ready")
        assert (health.status_code, GIVEN_UP in health.json()["reason"]) == (503, True)
        refused = await api.client.post("/v1/chat/completions", json=api.chat_body())
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_failed")


async def test_a_frozen_step_is_neither_alive_nor_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    async with served_api(engine) as api:
        assert (await api.client.get("/health/live")).status_code == 200
        engine.runner.gate.clear()
        answer = asyncio.create_task(
            api.client.post("/v1/chat/completions", json=api.chat_body(max_tokens=3))
        )
        await until(lambda: api.plugin.host.num_open == 1)
        monkeypatch.setattr(app.engine_host, "HEARTBEAT_LIMIT_S", 0.2)
        await until(lambda: not api.plugin.host.is_responsive)
        for path in ("/health/live", "/health/ready"):
            health = await api.client.get(path)
            assert health.status_code == 503
            assert "has not finished a step" in health.json()["reason"]
        monkeypatch.undo()
        engine.runner.gate.set()
        assert (await answer).status_code == 200
        assert (await api.client.get("/health/live")).status_code == 200


async def test_a_silent_stream_sends_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app.web.openai_responses, "PING_S", 0.05)
    engine = make_engine()
    async with served_api(engine) as api:
        engine.runner.gate.clear()
        body = api.chat_body(stream=True, max_tokens=3)
        async with api.client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.aiter_lines()
            async for line in lines:
                if line == ": ping":
                    break
            engine.runner.gate.set()
            rest = [line async for line in lines]
        assert "data: [DONE]" in rest


async def test_open_requests_may_end_while_the_server_drains(capsys: pytest.CaptureFixture[str]) -> None:
    engine = make_engine()
    engine.runner.step_s = 0.01
    async with served_api(engine, shutdown_timeout=10.0) as api:
        [open_stream] = await begin_streams(api, 1, max_tokens=40)
        api.plugin.host.begin_drain()
        refused = await api.client.post("/v1/chat/completions", json=api.chat_body())
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_shutdown")
        assert int(refused.headers["retry-after"]) >= 1
        ready = await api.client.get("/health/ready")
        assert (ready.status_code, ready.json()["reason"]) == (503, "draining")
        assert (await api.client.get("/health/live")).status_code == 200
        assert api.plugin.hub.status == "draining"
        api.server.should_exit = True
        assert read_events(await open_stream)[-1] == "[DONE]"
    assert "Stopping: 1 open request has 10 s to end." in capsys.readouterr().out


async def test_what_has_not_ended_in_time_is_told_so() -> None:
    engine = make_engine(max_num_seqs=2)
    engine.runner.step_s = 0.01
    async with served_api(engine, shutdown_timeout=0.0) as api:
        streams = await begin_streams(api, 4)  # two of them wait
        whole = asyncio.create_task(
            api.client.post("/v1/chat/completions", json=api.chat_body(max_tokens=3000))
        )
        await until(lambda: api.plugin.host.num_open == 5)
        api.server.should_exit = True
        for text in await asyncio.gather(*streams):
            assert read_events(text)[-1]["error"]["code"] == "server_shutdown"
            assert "[DONE]" not in text
        response = await whole
        assert (response.status_code, response.json()["error"]["code"]) == (503, "server_shutdown")
    assert not api.plugin.host.has_thread


async def test_a_step_in_progress_does_not_keep_clients_waiting_at_shutdown() -> None:
    engine = make_engine()
    async with served_api(engine, shutdown_timeout=0.0) as api:
        engine.runner.gate.clear()
        [answer] = await begin_streams(api, 1)
        api.server.should_exit = True
        events = read_events(await answer)
        assert events[-1]["error"]["code"] == "server_shutdown"
        engine.runner.gate.set()
