"""What tests of decisions share: events by kind, simulated time, and engines with it."""

from typing import Any, TypeVar

from engine.core import EngineCore
from engine.records import Event, StepResult
from engine.runner.fake import FakeRunner
from tests.builders import VOCAB_SIZE, make_config

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
