"""What tests of decisions share: events by kind, simulated time, and engines with it."""

from typing import Any, TypeVar

from engine.core import EngineCore
from engine.records import Event, StepResult
from engine.runner.base import ModelRunnerOutput
from engine.runner.fake import FakeRunner
from engine.scheduling.output import SchedulerOutput
from tests.builders import VOCAB_SIZE, make_config, make_request, run_to_end

EventT = TypeVar("EventT", bound=Event)

S = 1_000_000_000
"""Nanoseconds of a second."""


def events_of(results: list[StepResult], kind: type[EventT]) -> list[EventT]:
    """Return the events of one kind, in order."""
    return [event for result in results for event in result.record.events if isinstance(event, kind)]


class SimulatedClock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def make_timed_core(*, load_steps: int = 1, **overrides: Any) -> tuple[EngineCore, SimulatedClock]:
    """Return an engine and the clock it looks at."""
    config = make_config(**overrides)
    clock = SimulatedClock()
    runner = FakeRunner(config.num_blocks, config.block_size, vocab_size=VOCAB_SIZE, load_steps=load_steps)
    return EngineCore(config, runner, clock_ns=clock, wall_ns=clock), clock


def own_prompt(number: int, num_tokens: int) -> list[int]:
    """Return a prompt that shares nothing with those of other numbers below 40."""
    return [25 * number + position % 25 for position in range(num_tokens)]


class ForgetfulRunner(FakeRunner):
    """Never reports a load unless it is told to finish it, and reports some that nobody knows."""

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        output = super().execute(scheduler_output)
        finished = [*output.finished_loads, *output.finished_loads, 10**6]
        return ModelRunnerOutput(output.token_ids, 0, 0, finished)


def make_loading_core(load_steps: int) -> tuple[EngineCore, list[int]]:
    """Return an engine whose host tier holds a prompt that its pool does not, and the prompt."""
    config = make_config(num_blocks=8, num_host_blocks=64)
    runner = ForgetfulRunner(8, 4, vocab_size=VOCAB_SIZE, load_steps=load_steps)
    core = EngineCore(config, runner)
    prompt = own_prompt(1, 17)
    for name, tokens in (("a", prompt), ("b", own_prompt(2, 31))):
        core.add_request(make_request(name, prompt=tokens, max_tokens=1))
        run_to_end(core)
    return core, prompt
