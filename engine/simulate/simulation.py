"""Runs the real scheduler and engine core over a simulated load on a simulated clock.

Everything but the model's arithmetic and the clock is what a server runs, so whatever is decided is what a
server would decide at that pace. Deterministic: the same input gives the same records.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import RequestError
from engine.records import Finished, Policies, StepRecord
from engine.sampling_params import SamplingParams
from engine.sequence import EngineRequest
from engine.simulate.figures import Figures, Measurement
from engine.simulate.pace import Pace
from engine.simulate.runner import SimulatedClock, SimulatedRunner
from engine.simulate.workload import Ending, SimulatedLoad, SimulatedRequest

OnProgress = Callable[[float, int], None]
"""Called with the share of the load that has been handed to the engine, and the number of steps so far."""


class _Leave(NamedTuple):
    """A client leaves, or a choice is complete because of its text."""

    request_id: str
    choice_index: int
    is_complete: bool


_Command = list[SimulatedRequest] | Policies | _Leave


class Simulation:
    """One run; `records` may be read once."""

    def __init__(self, config: EngineConfig, load: SimulatedLoad, pace: Pace) -> None:
        """Build the engine; raises `ConfigError` for settings that cannot work."""
        self._commands = _in_order(load)
        self._num_done = 0
        self._pace = pace
        self._clock = SimulatedClock()
        self._runner = SimulatedRunner(self._clock, pace, load.requests)
        self._core = EngineCore(config, self._runner, clock_ns=self._clock.read, wall_ns=self._clock.read)

    @property
    def share_done(self) -> float:
        """How much of the load has been handed to the engine, 0 to 1."""
        return self._num_done / max(1, len(self._commands))

    def records(self) -> Iterator[StepRecord]:
        """Run to the end and yield each step's record."""
        core, runner = self._core, self._runner
        while True:
            self._take_due()
            result = core.step() if core.has_work else core.flush()
            if result is None:
                if self._num_done == len(self._commands):
                    return
                self._clock.now_ns = self._pace.begin(self._commands[self._num_done][0])
                continue
            for event in result.record.events:
                if isinstance(event, Finished):
                    runner.forget(event.seq_id)
            yield result.record

    def _take_due(self) -> None:
        """Give the engine all that is due by now."""
        for request_id, choice_index in self._runner.stops:
            self._core.stop(request_id, choice_index)
        self._runner.stops.clear()
        while self._num_done < len(self._commands):
            t_ns, command = self._commands[self._num_done]
            if t_ns > self._clock.now_ns:
                return
            self._num_done += 1
            self._apply(command)

    def _apply(self, command: _Command) -> None:
        match command:
            case Policies():
                self._core.set_policies(command)
            case _Leave(request_id, choice_index, is_complete=True):
                self._core.stop(request_id, choice_index)
            case _Leave(request_id):
                self._core.abort(request_id)
            case list():
                with suppress(RequestError):  # it is on record
                    self._core.add_requests([_make_request(request) for request in command])


def simulate(
    config: EngineConfig,
    load: SimulatedLoad,
    pace: Pace,
    *,
    counts_from_arrival: bool = True,
    on_progress: OnProgress = lambda *_: None,
) -> Figures:
    """Run a load to its end and return what it came to.

    TTFT counts from the arrivals in `load`, or else, as in a recording, from the end of the step that the
    engine was in by then. Raises `ConfigError` for settings that cannot work.
    """
    simulation = Simulation(config, load, pace)
    arrivals_ns = {request.request_id: request.arrival_ns for request in load.requests}
    measurement = Measurement(arrivals_ns if counts_from_arrival else None)
    for number, record in enumerate(simulation.records()):
        measurement.add(record)
        on_progress(simulation.share_done, number)
    return measurement.figures()


def _in_order(load: SimulatedLoad) -> list[tuple[int, _Command]]:
    """Return what happens when; at the same moment changes of policy come first and leaving last."""
    commands: list[tuple[int, int, _Command]] = [(t_ns, 0, policies) for t_ns, policies in load.policies]
    for _, choices in groupby(load.requests, key=attrgetter("request_id")):
        siblings = list(choices)
        commands.append((siblings[0].arrival_ns, 1, siblings))
    for request in load.requests:
        if request.leave_ns is not None:
            leave = _Leave(request.request_id, request.choice_index, request.ending is Ending.TEXT)
            commands.append((request.leave_ns, 2, leave))
    commands.sort(key=lambda command: command[:2])
    return [(t_ns, command) for t_ns, _, command in commands]


def _make_request(request: SimulatedRequest) -> EngineRequest:
    return EngineRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt,
        choice_index=request.choice_index,
        priority=request.priority,
        sampling_params=SamplingParams(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            ignore_eos=request.ending is not Ending.MODEL,
        ),
    )
