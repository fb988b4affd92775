"""What the scheduler decided in a step, with the names of those it was about."""

from collections import OrderedDict
from collections.abc import Mapping

import msgspec

from engine.records import (
    Admitted,
    Arrived,
    Event,
    Loaded,
    Policies,
    Preempted,
    Stalled,
    StepRecord,
    StopReason,
)
from engine.snapshot import PRIORITY_POLICY, EngineSnapshot

MAX_KEPT_STEPS = 2_048
MAX_KEPT_CANDIDATES = 50_000
"""Of all kept steps together; a candidate takes about 200 bytes."""

Decision = Preempted | Admitted | Loaded | Policies | Stalled


class SequenceName(msgspec.Struct, frozen=True, gc=False):
    """What a sequence is called, and how urgent it is."""

    request_id: str
    choice_index: int
    priority: int


class StepDecisions(msgspec.Struct, frozen=True, kw_only=True):
    """The decisions of one step in order. `names` by seq_id; who is not in it is not known any more.

    `policies` were in force in the step.
    """

    step: int
    t_ns: int
    stop_reason: StopReason
    events: list[Decision]
    names: dict[int, SequenceName]
    policies: Policies
    has_host_tier: bool

    @property
    def preemptions(self) -> list[Preempted]:
        """The preemptions of the step."""
        return [event for event in self.events if isinstance(event, Preempted)]


def make_decisions(before: EngineSnapshot, record: StepRecord) -> StepDecisions:
    """Describe a step; `before` is the state before it."""
    events = [event for event in record.events if isinstance(event, Decision)]
    names = {
        event.seq_id: SequenceName(event.request_id, event.choice_index, event.priority)
        for event in record.events
        if isinstance(event, Arrived)
    }
    for event in events:
        for seq_id in _mentioned(event):
            view = before.sequences.get(seq_id)
            if view is not None:
                names[seq_id] = SequenceName(view.request_id, view.choice_index, view.priority)
    changes = [event for event in events if isinstance(event, Policies)]
    return StepDecisions(
        step=record.step,
        t_ns=record.t_ns,
        stop_reason=StopReason(record.stop_reason),
        events=events,
        names=names,
        policies=changes[-1] if changes else before.policies,
        has_host_tier=before.config.num_host_blocks > 0,
    )


def order_candidates(event: Preempted, policy: str, priorities: Mapping[int, int]) -> list[tuple[int, float]]:
    """Return the candidates of a preemption, seq_id and score, in the order in which they would have gone.

    Under the queue policy "priority" the least urgent come first, who have the highest `priorities` (by
    seq_id); then, as under any other, the lowest score, of equal ones the latest arrival.
    """

    def place(candidate: tuple[int, float]) -> tuple[int, float, int]:
        seq_id, score = candidate
        return -priorities.get(seq_id, 0) if policy == PRIORITY_POLICY else 0, score, -seq_id

    return sorted(event.candidates, key=place)


def _mentioned(event: Event) -> list[int]:
    match event:
        case Preempted():
            return [event.seq_id, event.beneficiary, *(seq_id for seq_id, _ in event.candidates)]
        case Admitted() | Loaded() | Stalled():
            return [event.seq_id]
        case _:
            return []


class DecisionLog:
    """The decisions of the newest steps that had any; the oldest are forgotten."""

    def __init__(self) -> None:
        """Start empty."""
        self._steps: OrderedDict[int, StepDecisions] = OrderedDict()
        self._num_candidates = 0

    def note(self, before: EngineSnapshot, record: StepRecord) -> None:
        """Take a step that is about to be folded into `before`."""
        if not any(isinstance(event, Decision) for event in record.events):
            return
        found = make_decisions(before, record)
        self._steps[record.step] = found
        self._num_candidates += _count_candidates(found)
        while len(self._steps) > MAX_KEPT_STEPS or self._num_candidates > MAX_KEPT_CANDIDATES:
            _, oldest = self._steps.popitem(last=False)
            self._num_candidates -= _count_candidates(oldest)

    def find(self, step: int) -> StepDecisions | None:
        """Return the decisions of a step; None for one that had none or is forgotten."""
        return self._steps.get(step)

    def newest_preemptions(self, limit: int) -> list[tuple[StepDecisions, Preempted]]:
        """Return the newest preemptions, newest first, with all that was decided in the same step."""
        newest: list[tuple[StepDecisions, Preempted]] = []
        for found in reversed(self._steps.values()):
            newest += [(found, event) for event in reversed(found.preemptions)]
            if len(newest) >= limit:
                break
        return newest[:limit]


def _count_candidates(found: StepDecisions) -> int:
    return sum(len(event.candidates) for event in found.preemptions)
