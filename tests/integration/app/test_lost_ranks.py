"""An engine that has lost a part of itself, over a real port: not ready, not dead, and then back."""

import asyncio
import logging
import threading
from collections.abc import Callable

import pytest

import app.engine_host
from app.engine_thread import GIVEN_UP, TOO_MANY_FAILURES
from engine.errors import RankError
from engine.records import Reset
from tests.support.api import begin_streams, read_events, served_api, until
from tests.support.fake_engine import FakeEngine, ScriptedRunner


class LosingRunner(ScriptedRunner):
    """Loses what the test says, and gets it back once `way` is open."""

    loss: str | None = None
    num_resets = 0
    num_recoveries = 0
    num_closes = 0

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.way = threading.Event()

    def recover(self, on_wait: Callable[[], None]) -> None:
        self.num_recoveries += 1
        while not self.way.wait(0.01):
            on_wait()
        self.loss = None

    def reset(self) -> None:
        super().reset()
        self.num_resets += 1

    def close(self) -> None:
        self.num_closes += 1


def make_engine() -> tuple[FakeEngine, LosingRunner]:
    engine = FakeEngine(num_blocks=2048, max_model_len=4096)
    runner = LosingRunner(engine.core.config.num_blocks, engine.core.config.block_size)
    engine.core.runner = engine.runner = runner
    return engine, runner


async def test_a_loss_while_idle_turns_readiness_off_until_all_is_there_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, runner = make_engine()
    async with served_api(engine) as api:
        host = api.plugin.host
        runner.loss = "Rank 1 of 2 failed: it was ended by SIGKILL."  # nobody asks for anything
        await until(lambda: host.status == "loading")
        monkeypatch.setattr(app.engine_host, "HEARTBEAT_LIMIT_S", 0.0)  # however long it takes
        ready = await api.client.get("/health/ready")
        assert (ready.status_code, ready.json()["reason"]) == (503, "loading")
        assert ready.json()["progress"] == {"stage": "starting over", "fraction": 0.0}
        assert (await api.client.get("/health/live")).status_code == 200
        assert api.plugin.hub.status == "loading"
        assert "starting over" in (await api.client.get("/live")).text
        monkeypatch.undo()

        waiting = asyncio.create_task(
            api.client.post("/v1/chat/completions", json=api.chat_body(max_tokens=3))
        )
        await until(lambda: bool(host._admissions))
        assert (await api.client.get("/health")).json()["num_open_requests"] == 1
        assert runner.num_steps == 0
        runner.way.set()
        answer = await waiting
        assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 3)
        assert (await api.client.get("/health/ready")).status_code == 200
        assert (host.status, host.progress, api.plugin.hub.status) == ("ready", None, "ready")
        assert runner.num_resets == 1
    assert runner.num_closes == 1


async def test_a_loss_in_a_step_ends_its_requests_and_no_others() -> None:
    engine, runner = make_engine()
    runner.step_s = 0.01
    async with served_api(engine) as api:
        streams = await begin_streams(api, 3)
        await until(lambda: runner.num_steps > 3)
        runner.loss = "Rank 1 of 2 failed: it was ended by SIGKILL."
        for stream in streams:
            assert read_events(await stream)[-1]["error"]["code"] == "engine_error"
        assert api.plugin.host.status == "loading"
        runner.way.set()
        await until(lambda: api.plugin.host.status == "ready")
        answer = await api.client.post("/v1/chat/completions", json=api.chat_body(max_tokens=3))
        assert answer.status_code == 200


async def test_what_cannot_be_had_back_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner = make_engine()
    async with served_api(engine) as api:
        monkeypatch.setattr(runner, "recover", lambda _: 1 / 0)
        runner.loss = "Rank 1 of 2 failed: it was ended by SIGKILL."
        await until(lambda: api.plugin.host.status == "failed")
        health = await api.client.get("/health/live")
        assert (health.status_code, GIVEN_UP in health.json()["reason"]) == (503, True)
        assert (await api.client.get("/health/ready")).json()["progress"] is None
        assert api.plugin.host.activity == "is stuck in a step"
        await until(lambda: runner.num_closes == 1)


async def test_why_ranks_cannot_be_had_back_is_for_the_operator_only_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, runner = make_engine()
    reason = "Rank 1 of 2 failed: /private/model: cannot read the model file."

    def fail(_: object) -> None:
        raise RankError(reason)

    async with served_api(engine) as api:
        monkeypatch.setattr(runner, "recover", fail)
        runner.loss = "Rank 1 of 2 failed: it was ended by SIGKILL."
        await until(lambda: api.plugin.host.status == "failed")
        assert reason in (await api.client.get("/health")).json()["error"]
        refused = await api.client.post("/v1/chat/completions", json=api.chat_body())
        assert (refused.status_code, GIVEN_UP in refused.text, "private" in refused.text) == (
            503,
            True,
            False,
        )
    (record,) = (record for record in caplog.records if record.levelno == logging.ERROR)
    assert (reason in record.getMessage(), record.exc_info) == (True, None)


async def test_three_losses_end_the_engine_which_does_not_load_in_vain(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, runner = make_engine()
    runner.way.set()
    async with served_api(engine) as api:
        for _ in range(3):
            runner.loss = "Rank 1 of 2 failed: it was ended by SIGKILL."
            await until(lambda: runner.loss is None or api.plugin.host.status == "failed")
        assert api.plugin.host.error == TOO_MANY_FAILURES
        assert runner.num_recoveries == 2
    assert "failed 3 times within a minute; it is given up" in caplog.text


async def test_a_server_that_stops_does_not_wait_for_what_is_loaded_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, runner = make_engine()
    async with served_api(engine) as api:
        runner.loss = "Rank 1 of 2 failed: it was ended by SIGKILL."
        await until(lambda: runner.num_recoveries == 1)
    assert not api.plugin.host.has_thread  # though the way is not open
    assert (api.plugin.host.error, runner.num_closes) == (None, 1)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_an_ordinary_failed_step_stays_ready_and_draining_stays_draining() -> None:
    engine, runner = make_engine()
    async with served_api(engine) as api:
        seen: list[str] = []
        api.plugin.host.add_status_listener(lambda: seen.append(str(api.plugin.host.status)))
        runner.way.set()
        runner.failures = 1
        await api.client.post("/v1/chat/completions", json=api.chat_body(max_tokens=3))
        await until(lambda: runner.num_resets == 1)
        assert seen == []
        runner.way.clear()
        api.plugin.host.begin_drain()
        runner.loss = "Rank 1 of 2 failed: it was ended by SIGKILL."
        await until(lambda: api.plugin.host.activity == "is still starting over")
        runner.way.set()
        await until(lambda: api.plugin.host.activity == "is stuck in a step")
        assert set(seen) == {"draining"}


async def test_the_loss_is_on_record() -> None:
    engine, runner = make_engine()
    runner.way.set()
    async with served_api(engine) as api:
        resets: list[str] = []

        def note(record: object, _: object) -> None:
            resets.extend(event.error for event in getattr(record, "events", []) if isinstance(event, Reset))

        api.plugin.hub.forward_records(note)
        runner.loss = "Rank 1 of 2 failed: it was ended by SIGKILL."
        await until(lambda: resets == ["RankError"])
