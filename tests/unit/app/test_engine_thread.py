import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from app.engine_commands import Abort, AppliedPolicies, Command, SetPolicies, StopChoice, Submit
from app.engine_thread import GIVEN_UP, OUTBOX_STEPS, STEP_FAILED, EngineThread, ThreadEvents
from app.errors import InterruptedAnswerError
from engine.errors import ConfigError, EngineDeadError, EngineError
from engine.records import Finished, Policies, Reset, StepResult
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler import Scheduler
from engine.sequence import EngineRequest
from tests.support.api import until
from tests.support.fake_engine import FakeEngine

Results = list[tuple[StepResult, str | None]]


def make_request(request_id: str, max_tokens: int) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens)
    return EngineRequest(request_id=request_id, prompt_token_ids=[1, 2, 3], sampling_params=params)


class Recorder:
    """Keeps what the thread reports."""

    def __init__(self) -> None:
        self.results: Results = []
        self.largest = 0
        self.loaded = asyncio.Event()
        self.failures: list[str] = []

    def make_thread(self, engine: FakeEngine) -> EngineThread:
        events = ThreadEvents(
            on_progress=lambda _: None,
            on_loaded=lambda _, __: self.loaded.set(),
            on_results=self._take,
            on_failed=lambda error, _: self.failures.append(error),
        )
        return EngineThread(engine.load, events)

    @asynccontextmanager
    async def run(self, engine: FakeEngine) -> AsyncIterator[EngineThread]:
        """A loaded thread; ended in any case, or a test that fails would keep the process alive."""
        thread = self.make_thread(engine)
        thread.start()
        try:
            await self.loaded.wait()
            yield thread
        finally:
            engine.runner.gate.set()
            await thread.stop(5)

    def _take(self, results: Results) -> None:
        self.largest = max(self.largest, len(results))
        self.results += results

    @property
    def steps(self) -> list[int]:
        return [result.record.step for result, _ in self.results]


async def submit(thread: EngineThread, *requests: EngineRequest) -> None:
    admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    thread.send(Submit(list(requests), admitted))
    await admitted


async def test_a_loop_that_lags_makes_the_engine_wait_and_loses_nothing() -> None:
    engine, recorder = FakeEngine(num_blocks=1024, max_model_len=4096), Recorder()
    thread = recorder.make_thread(engine)
    thread.start()
    await recorder.loaded.wait()
    await submit(thread, make_request("r", 1000))
    time.sleep(0.5)  # noqa: ASYNC251 - the lag under test: enough for all 1,000 steps
    await until(lambda: not engine.core.has_work)
    await until(lambda: len(recorder.steps) == 1000)
    assert recorder.steps == list(range(1, 1001))
    assert recorder.largest <= OUTBOX_STEPS
    await thread.stop(5)
    assert not thread.is_alive


async def test_stopping_ends_an_engine_that_waits_for_the_loop() -> None:
    engine, recorder = FakeEngine(num_blocks=1024, max_model_len=4096), Recorder()
    thread = recorder.make_thread(engine)
    thread.start()
    await recorder.loaded.wait()
    await submit(thread, make_request("r", 4000))
    time.sleep(0.2)  # noqa: ASYNC251 - the outbox fills up
    await thread.stop(5)
    assert not thread.is_alive


async def test_an_idle_engine_records_what_changes_without_a_step() -> None:
    engine, recorder = FakeEngine(), Recorder()
    async with recorder.run(engine) as thread:
        with pytest.raises(EngineError, match="tokens"):
            await submit(
                thread,
                make_request("good", 5),
                EngineRequest(
                    request_id="good", choice_index=1, prompt_token_ids=[], sampling_params=SamplingParams()
                ),
            )
        await until(lambda: len(recorder.results) == 1)
        record = recorder.results[0][0].record
        assert [type(event).__name__ for event in record.events] == ["Rejected"]
        assert engine.runner.num_steps == 0


async def test_a_refused_duplicate_leaves_the_original_alone() -> None:
    engine, recorder = FakeEngine(), Recorder()
    async with recorder.run(engine) as thread:
        engine.runner.gate.clear()
        await submit(thread, make_request("r", 5))
        refused = asyncio.create_task(submit(thread, make_request("r", 7)))
        await asyncio.sleep(0)  # it is on its way before the original can end
        engine.runner.gate.set()
        with pytest.raises(EngineError, match="running already"):
            await refused
        await until(lambda: not engine.core.has_work)
        await until(
            lambda: any(output.finish_reason for result, _ in recorder.results for output in result.outputs)
        )
        outputs = [output for result, _ in recorder.results for output in result.outputs]
        assert [output.finish_reason for output in outputs] == [None] * 4 + ["length"]


async def test_a_request_that_comes_after_the_end_is_refused() -> None:
    engine, recorder = FakeEngine(), Recorder()
    thread = recorder.make_thread(engine)
    thread.start()
    await recorder.loaded.wait()
    engine.runner.gate.clear()
    await submit(thread, make_request("first", 5))
    await until(lambda: engine.runner.num_begun == 1)  # from here on it takes no command before the step ends
    admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    stopping = asyncio.create_task(thread.stop(10))
    await asyncio.sleep(0)
    thread.send(Submit([make_request("late", 5)], admitted))
    engine.runner.gate.set()
    with pytest.raises(EngineError, match="stopped"):
        await admitted
    await stopping


async def test_what_is_aborted_because_the_engine_stops_is_on_record() -> None:
    engine, recorder = FakeEngine(), Recorder()
    async with recorder.run(engine) as thread:
        engine.runner.gate.clear()
        await submit(thread, make_request("r", 50))
        thread.send(Abort("r"))
        stopping = asyncio.create_task(thread.stop(10))
        await asyncio.sleep(0)
        engine.runner.gate.set()
        await stopping
        await until(
            lambda: any(output.finish_reason for result, _ in recorder.results for output in result.outputs)
        )
        last = recorder.results[-1][0].record
        assert [event.reason for event in last.events if isinstance(event, Finished)] == ["abort"]
        assert last.num_used == 0


async def test_broken_books_are_noticed_while_idle_and_the_pool_is_rebuilt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, recorder = FakeEngine(), Recorder()
    thread = recorder.make_thread(engine)
    engine.core.scheduler.state.kv.pool.blocks[3].ref_cnt = 1
    thread.start()
    await until(lambda: len(recorder.results) == 1)
    result, error = recorder.results[0]
    assert error == STEP_FAILED
    assert [event.error for event in result.record.events if isinstance(event, Reset)] == [
        "EngineInvariantError"
    ]
    assert (result.record.num_free, result.record.num_used) == (64, 0)
    assert recorder.failures == []
    engine.core.check_integrity()
    assert "A step failed" in caplog.text
    await thread.stop(5)


async def test_a_submission_that_breaks_the_engine_is_told_and_the_engine_starts_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, recorder = FakeEngine(), Recorder()
    async with recorder.run(engine) as thread:
        with monkeypatch.context() as patch:
            patch.setattr(engine.core, "add_requests", lambda requests: 1 / 0)
            with pytest.raises(InterruptedAnswerError) as caught:
                await submit(thread, make_request("r", 5))
        assert (str(caught.value), caught.value.code) == (STEP_FAILED, "engine_error")
        # The client is told first; the engine thread writes the log when it gets there.
        await until(lambda: "ZeroDivisionError" in caplog.text)
        await submit(thread, make_request("r", 5))
        await until(lambda: recorder.steps != [] and not engine.core.has_work)
        assert recorder.failures == []


def set_policies(thread: EngineThread, **changes: str) -> "asyncio.Future[AppliedPolicies]":
    applied: asyncio.Future[AppliedPolicies] = asyncio.get_running_loop().create_future()
    thread.send(SetPolicies(changes, applied))
    return applied


async def test_policies_are_told_once_their_record_is_handed_over() -> None:
    engine, recorder = FakeEngine(), Recorder()
    async with recorder.run(engine) as thread:
        first = await set_policies(thread, policy="priority")
        assert first == AppliedPolicies(Policies("priority", "newest-first", "auto"), 1)
        assert recorder.steps == [1], "an idle engine writes a record of its own"
        assert recorder.results[0][0].record.events == [first.policies]

        second = await set_policies(thread, preemption="oldest-first")
        assert second == AppliedPolicies(Policies("priority", "oldest-first", "auto"), 2)
        assert engine.runner.num_steps == 0


async def test_policies_that_cannot_be_are_refused_and_leave_no_record() -> None:
    engine, recorder = FakeEngine(), Recorder()
    async with recorder.run(engine) as thread:
        for changes in ({"policy": "lottery"}, {"preemption_mode": "swap"}):
            with pytest.raises(ConfigError, match=r"allowed: fcfs|there is no host tier"):
                await set_policies(thread, **changes)
        assert recorder.steps == []
        assert engine.core.policies == Policies("fcfs", "newest-first", "auto")


async def test_policies_set_as_a_step_fails_are_in_force_after_it() -> None:
    engine, recorder = FakeEngine(), Recorder()
    async with recorder.run(engine) as thread:
        engine.runner.gate.clear()
        await submit(thread, make_request("r", 5))
        engine.runner.failures = 1
        applied = set_policies(thread, policy="priority")
        engine.runner.gate.set()
        told = await applied
        assert told.policies == engine.core.policies == Policies("priority", "newest-first", "auto")
        assert told.step in recorder.steps


async def test_policies_that_come_after_the_end_are_refused() -> None:
    engine, recorder = FakeEngine(), Recorder()
    thread = recorder.make_thread(engine)
    thread.start()
    await recorder.loaded.wait()
    engine.runner.gate.clear()
    await submit(thread, make_request("first", 5))
    await until(lambda: engine.runner.num_begun == 1)
    stopping = asyncio.create_task(thread.stop(10))
    await asyncio.sleep(0)
    late = set_policies(thread, policy="priority")
    engine.runner.gate.set()
    with pytest.raises(EngineDeadError, match="stopped"):
        await late
    await stopping


@pytest.mark.parametrize("command", [Abort("r"), StopChoice("r", 0)])
async def test_other_commands_that_break_the_engine_are_failed_steps(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, recorder = FakeEngine(), Recorder()
    async with recorder.run(engine) as thread:
        with monkeypatch.context() as patch:
            for name in ("abort", "stop"):
                patch.setattr(engine.core, name, lambda *_: 1 / 0)
            thread.send(command)
            await until(lambda: len(recorder.results) == 1)
        assert recorder.results[0][1] == STEP_FAILED
        await submit(thread, make_request("r", 5))
        assert thread.is_alive
        assert recorder.failures == []


def ends_of(results: Results) -> list[tuple[str, str | None, str | None]]:
    """Return who has ended, why, and what its client is told."""
    return [
        (output.request_id, output.finish_reason, error)
        for result, error in results
        for output in result.outputs
        if output.finish_reason is not None
    ]


async def test_ends_are_told_before_the_runner_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, recorder = FakeEngine(), Recorder()
    gate = threading.Event()
    async with recorder.run(engine) as thread:
        monkeypatch.setattr(engine.runner, "reset", lambda: gate.wait(20))
        engine.runner.failures = 1
        try:
            await submit(thread, make_request("r", 5))
            await until(lambda: len(recorder.results) == 1)
        finally:
            gate.set()
        assert ends_of(recorder.results) == [("r", "error", STEP_FAILED)]
        await submit(thread, make_request("next", 2))
        await until(lambda: len(ends_of(recorder.results)) == 2)
        assert recorder.failures == []


async def test_a_runner_that_cannot_be_reset_ends_the_engine_after_all_ends_are_on_record(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, recorder = FakeEngine(max_num_seqs=1), Recorder()
    async with recorder.run(engine) as thread:
        monkeypatch.setattr(engine.runner, "reset", lambda: 1 / 0)
        engine.runner.gate.clear()
        running, waiting = make_request("r", 5), make_request("r", 6)
        waiting = msgspec.structs.replace(waiting, choice_index=1)
        await submit(thread, running, waiting)
        await until(lambda: engine.runner.num_begun == 1)
        late = set_policies(thread, policy="priority")
        engine.runner.failures = 1
        engine.runner.gate.set()
        with pytest.raises(EngineDeadError, match="stopped"):
            await late
        await until(lambda: not thread.is_alive and recorder.failures != [])
    assert recorder.failures == [GIVEN_UP]
    assert ends_of(recorder.results) == 2 * [("r", "error", STEP_FAILED)]
    last = recorder.results[-1][0].record
    assert (last.num_running, last.num_waiting, last.num_used) == (0, 0, 0)
    assert "ZeroDivisionError" in caplog.text


async def test_ends_that_cannot_be_told_at_first_are_told_at_the_second_try(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, recorder = FakeEngine(), Recorder()
    make_scheduler, failures = engine.core._make_scheduler, [MemoryError("injected")]

    def fail_once() -> Scheduler:
        if failures:
            raise failures.pop()
        return make_scheduler()

    async with recorder.run(engine) as thread:
        monkeypatch.setattr(engine.core, "_make_scheduler", fail_once)
        engine.runner.failures = 1
        await submit(thread, make_request("r", 5))
        await until(lambda: len(recorder.results) == 1)
        assert ends_of(recorder.results) == [("r", "error", STEP_FAILED)]
        assert "MemoryError: injected" in caplog.text
        await submit(thread, make_request("next", 2))
        await until(lambda: len(ends_of(recorder.results)) == 2)
        assert recorder.failures == []


async def test_ends_that_can_never_be_told_end_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, recorder = FakeEngine(), Recorder()
    async with recorder.run(engine) as thread:
        monkeypatch.setattr(engine.core, "fail_all", lambda _: 1 / 0)
        engine.runner.failures = 1
        await submit(thread, make_request("r", 5))
        await until(lambda: not thread.is_alive and recorder.failures != [])
    assert recorder.failures == [STEP_FAILED]
    assert "The engine thread ended with ZeroDivisionError" in caplog.text
