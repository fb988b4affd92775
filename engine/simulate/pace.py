"""How time passes in a simulation: when each step ends, and which loads from the host tier end with it."""

from collections import deque
from collections.abc import Iterable
from typing import Protocol

import msgspec

from engine.records import Loaded, RecordKind, StepRecord
from engine.scheduling.output import SchedulerOutput
from engine.simulate.costs import StepCosts, measured_ns, planned_work


class Pace(Protocol):
    """Gives each step its duration."""

    def begin(self, now_ns: int) -> int:
        """Return when an idle engine, which has had something to do since `now_ns`, begins its next step."""
        ...

    def run(self, output: SchedulerOutput, now_ns: int) -> tuple[int, list[int]]:
        """Return when a step that begins now ends, and the ids of the loads that have ended by then."""
        ...


class ReckonedPace:
    """Steps take what their work costs. Loads go one after another, beside the steps.

    A step waits for the blocks that it copies to the host tier, since it is about to write them.
    """

    def __init__(self, costs: StepCosts, *, copy_ns_per_block: float = 0.0) -> None:
        """Begin with no load under way. `copy_ns_per_block` counts for what `costs` does not know of."""
        if costs.copied_block_ns == 0:
            costs = msgspec.structs.replace(costs, copied_block_ns=copy_ns_per_block)
        self._costs = costs
        self._copy_ns_per_block = copy_ns_per_block
        self._loads: deque[tuple[int, int]] = deque()  # end, id

    def begin(self, now_ns: int) -> int:
        """Begin at once."""
        return now_ns

    def run(self, output: SchedulerOutput, now_ns: int) -> tuple[int, list[int]]:
        """Reckon one step; it waits for the loads that it is told to wait for."""
        end_ns = now_ns + max(1, round(self._costs.reckon_ns(planned_work(output))))
        free_ns = now_ns + round(len(output.swap_outs) * self._costs.copied_block_ns)
        for load in output.loads:
            begin_ns = max(self._loads[-1][0], free_ns) if self._loads else free_ns
            self._loads.append((begin_ns + round(len(load.pairs) * self._copy_ns_per_block), load.load_id))
        awaited = set(output.awaited_loads)
        finished: list[int] = []
        while self._loads and (awaited or self._loads[0][0] <= end_ns):
            ended_ns, load_id = self._loads.popleft()
            end_ns = max(end_ns, ended_ns)
            awaited.discard(load_id)
            finished.append(load_id)
        return end_ns, finished


class RecordedPace:
    """Steps take what they took in a recording, and loads end in the steps in which they did.

    With the load and the settings of the recording the same is decided in each step.
    """

    def __init__(self, records: Iterable[StepRecord]) -> None:
        """Note the times of all steps."""
        steps = [record for record in records if record.kind == RecordKind.STEP]
        self._starts = deque(record.t_ns for record in steps)
        self._last_ns = measured_ns(steps[-1]) if steps else 0
        self._loaded = deque(
            [event.seq_id for event in record.events if isinstance(event, Loaded)] for record in steps
        )
        self._ids: dict[int, int] = {}  # owner -> load

    def begin(self, now_ns: int) -> int:
        """Begin when the recording's next step does."""
        return max(now_ns, self._starts[0]) if self._starts else now_ns

    def run(self, output: SchedulerOutput, now_ns: int) -> tuple[int, list[int]]:
        """Return when the recording's next step began, or the end of its last step."""
        self._ids.update((load.owner, load.load_id) for load in output.loads)
        owners = self._loaded.popleft() if self._loaded else []
        finished = [self._ids.pop(owner) for owner in owners if owner in self._ids]
        missed = [load_id for load_id in output.awaited_loads if load_id not in finished]
        if self._starts:
            self._starts.popleft()
        end_ns = self._starts[0] if self._starts else now_ns + self._last_ns
        return max(end_ns, now_ns + 1), finished + missed
