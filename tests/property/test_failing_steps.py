"""Wherever a step fails, every request is told exactly once, and the records stay whole."""

import random
import sys
from collections import Counter
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from engine.core import EngineCore
from engine.errors import EngineInvariantError
from engine.records import FAILED_TOKEN_ID, StepResult
from engine.runner.base import LocalRunner, ModelRunnerOutput
from engine.scheduling.output import SchedulerOutput
from engine.snapshot import EngineSnapshot
from tests.builders import (
    folded_state,
    make_core,
    make_request,
    run_to_end,
    solo_output,
    state_from_books,
    tokens_of,
)


class InjectedError(Exception):
    """Raised where no code of the engine would."""


class FailAtCall:
    """Makes the n-th call of an engine function fail, wherever that is."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.num_calls = 0
        self.where: str | None = None

    def __enter__(self) -> None:
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _arg: Any) -> None:
        if event == "call" and self.where is None and "/engine/" in frame.f_code.co_filename:
            self.num_calls += 1
            if self.num_calls == self.number:
                self.where = frame.f_code.co_qualname
                raise InjectedError(self.where)


def run_until_failure(core: EngineCore, fail: FailAtCall) -> tuple[list[StepResult], bool]:
    """Step until a step fails or nothing is left; return the results and whether one failed."""
    results: list[StepResult] = []
    while core.has_work:
        try:
            with fail:
                result = core.step()
        except InjectedError as error:
            results.append(core.fail_all(str(error)))
            return results, True
        results.append(result)
    return results, False


@pytest.mark.parametrize("seed", range(3))
def test_every_request_ends_exactly_once_wherever_a_step_fails(seed: int) -> None:
    sites = set()
    for number in range(1, 2000):
        rng = random.Random(seed)
        core = make_core(num_blocks=6, max_num_batched_tokens=12)
        prefix = [rng.randrange(1000) for _ in range(20)]
        requests = [
            make_request(f"r{index}", prompt=prefix[: rng.randrange(1, 18)], max_tokens=rng.randrange(4, 12))
            for index in range(6)
        ]
        core.add_requests(requests)
        fail = FailAtCall(number)
        results, has_failed = run_until_failure(core, fail)
        if not has_failed:
            break
        sites.add(fail.where)
        snapshot = EngineSnapshot(core.config)
        for result in results:
            snapshot.apply(result.record)
        assert folded_state(snapshot) == state_from_books(core), fail.where
        ended = Counter(output.request_id for r in results for output in r.outputs if output.finish_reason)
        assert ended == {request.request_id: 1 for request in requests}, fail.where
        tokens = tokens_of(results)
        for request in requests:
            got = tokens.get(request.request_id, [])
            assert got == solo_output(request.prompt_token_ids, len(got)), fail.where
        assert snapshot.totals.num_output_tokens == sum(map(len, tokens.values())), fail.where
    expected = {
        "SchedulerState.preempt",
        "SchedulerState.finish",
        "SchedulerState._release",
        "BlockPool._evict",
    }
    assert expected <= sites


def test_every_request_ends_exactly_once_wherever_the_end_of_a_failed_step_fails() -> None:
    sites = set()
    for number in range(1, 2000):
        core = make_core(num_blocks=6, max_num_batched_tokens=12)
        requests = [make_request(f"r{index}", prompt=9, max_tokens=9) for index in range(4)]
        core.add_requests(requests)
        results = [core.step(), core.step()]
        core.set_policies(core.policies)
        fail = FailAtCall(number)
        try:
            with fail:
                result = core.fail_all("first")
        except InjectedError:
            result = core.fail_all("second")
        results.append(result)
        snapshot = EngineSnapshot(core.config)
        for result in results:
            snapshot.apply(result.record)
        assert folded_state(snapshot) == state_from_books(core), fail.where
        ended = Counter(output.request_id for r in results for output in r.outputs if output.finish_reason)
        assert ended == {request.request_id: 1 for request in requests}, fail.where
        assert snapshot.totals.num_failed == len(requests), fail.where
        if fail.where is None:
            break
        sites.add(fail.where)
    assert {"EngineCore.fail_all", "Scheduler.fail_all", "EngineCore._take_result"} <= sites


def test_no_step_runs_before_the_runner_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(num_blocks=32)
    core.add_request(make_request("a", prompt=4, max_tokens=9))
    core.step()
    calls: list[str] = []
    reset, execute = core.runner.reset, core.runner.execute

    def note_reset() -> None:
        calls.append("reset")
        if calls == ["reset"]:
            raise InjectedError
        reset()

    def note_execute(output: SchedulerOutput) -> ModelRunnerOutput:
        calls.append("execute")
        return execute(output)

    monkeypatch.setattr(core.runner, "reset", note_reset)
    monkeypatch.setattr(core.runner, "execute", note_execute)
    assert [output.request_id for output in core.fail_all("broken").outputs] == ["a"]
    core.add_request(make_request("b", prompt=4, max_tokens=2))
    with pytest.raises(InjectedError):
        core.step()
    run_to_end(core)
    assert calls == ["reset", "reset", "execute", "execute"]
    core.reset_runner()
    assert len(calls) == 4, "there is nothing to forget"


class ShortRunner(LocalRunner):
    """Wraps a runner; from the third step on it returns what a broken model might."""

    def __init__(self, core: EngineCore, broken: list[int]) -> None:
        self._inner = core.runner
        self._broken = broken
        self._num_steps = 0
        self.vocab_size = core.runner.vocab_size
        self.eos_token_ids = core.runner.eos_token_ids

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        self._num_steps += 1
        output = self._inner.execute(scheduler_output)
        if self._num_steps < 3:
            return output
        return ModelRunnerOutput([*output.token_ids[:-1], *self._broken], 0, 0)

    def reset(self) -> None:
        self._inner.reset()


def test_one_failed_token_ends_one_sequence() -> None:
    core = make_core(num_blocks=32)
    core.runner = ShortRunner(core, [FAILED_TOKEN_ID])
    core.add_requests([make_request(name, prompt=4, max_tokens=9) for name in ("a", "b")])
    results = [core.step(), core.step(), core.step()]
    assert [(output.request_id, output.finish_reason) for output in results[-1].outputs] == [
        ("a", None),
        ("b", "error"),
    ]
    snapshot = EngineSnapshot(core.config)
    for result in results:
        snapshot.apply(result.record)
    assert folded_state(snapshot) == state_from_books(core)
    assert (snapshot.totals.num_failed, snapshot.totals.num_output_tokens) == (1, 5)


class ForgetfulRunner(LocalRunner):
    """Wraps a runner; in one step it has no memory for the first sequence, and computes nothing of it."""

    def __init__(self, core: EngineCore, failing_step: int) -> None:
        self._inner = core.runner
        self._steps_left = failing_step
        self.vocab_size = core.runner.vocab_size
        self.eos_token_ids = core.runner.eos_token_ids

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        self._steps_left -= 1
        if self._steps_left:
            return self._inner.execute(scheduler_output)
        output = self._inner.execute(replace(scheduler_output, scheduled=scheduler_output.scheduled[1:]))
        return ModelRunnerOutput([FAILED_TOKEN_ID, *output.token_ids], 0, 0)

    def reset(self) -> None:
        self._inner.reset()


@pytest.mark.parametrize("failing_step", [1, 2, 3])
def test_a_chunk_that_cannot_be_computed_ends_its_sequence_and_is_found_by_nobody(failing_step: int) -> None:
    core = make_core(num_blocks=32, block_size=4, max_num_batched_tokens=8)
    core.runner = ForgetfulRunner(core, failing_step)
    prompt = list(range(20))
    core.add_request(make_request("a", prompt=prompt))  # in chunks of 8, 8 and 4 tokens
    core.add_request(make_request("b", prompt=prompt))  # waits for what both begin with
    results = run_to_end(core)
    ends = {output.request_id: output.finish_reason for result in results for output in result.outputs}
    assert ends == {"a": "error", "b": "length"}
    answers = tokens_of(results)
    assert answers.get("a", []) == []
    assert answers["b"] == solo_output(prompt, 4)
    cached = [output.num_cached_tokens for result in results for output in result.outputs]
    assert max(cached) == 8 * (failing_step - 1)
    snapshot = EngineSnapshot(core.config)
    for result in results:
        snapshot.apply(result.record)
    assert folded_state(snapshot) == state_from_books(core)
    assert snapshot.totals.num_failed == 1


@pytest.mark.parametrize("broken", [[], [1000], [-1], [5, 5]])
def test_broken_model_output_books_nothing_of_its_step(broken: list[int]) -> None:
    core = make_core(num_blocks=32)
    whole_runner = core.runner
    core.runner = ShortRunner(core, broken)
    for name in ("a", "b"):
        core.add_request(make_request(name, prompt=4, max_tokens=9))
    results = [core.step(), core.step()]
    with pytest.raises(EngineInvariantError):
        core.step()
    results.append(core.fail_all("broken"))
    assert {name: len(tokens) for name, tokens in tokens_of(results).items()} == {"a": 2, "b": 2}
    core.runner = whole_runner
    core.add_request(make_request("c", max_tokens=2))
    assert len(tokens_of(run_to_end(core))["c"]) == 2
