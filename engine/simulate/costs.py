"""What a step takes, as a sum over the work in it, and the fit of that to recorded steps.

    ns = step + prefill tokens * a + decode tokens * b + context read by decoding * c
         + pairs of a prefill token and one that it sees * d + blocks copied to the host tier * e

with no negative coefficient. Context and pairs are apart because decoding waits for memory (each token of
context is read once) while prefill is bound by arithmetic (each pair is a product).
"""

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import NamedTuple

import msgspec

from engine.errors import ConfigError
from engine.records import BlockOpKind, RecordKind, StepRecord
from engine.scheduling.output import SchedulerOutput

MIN_STEPS = 20
"""Fewer recorded steps say too little."""

MAX_GAP_NS = 20_000_000
"""What a step may take outside of its measured parts; a longer pause until the next one is no part of it."""

_SINGULAR = 1e-10


class StepWork(NamedTuple):
    """What a step has to do; the first is 1 where anything is computed."""

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_context_tokens: int = 0
    num_prefill_pairs: int = 0
    num_copied_blocks: int = 0


class StepCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Nanoseconds for each thing that `StepWork` counts."""

    step_ns: float = 0.0
    prefill_token_ns: float = 0.0
    decode_token_ns: float = 0.0
    context_token_ns: float = 0.0
    prefill_pair_ns: float = 0.0
    copied_block_ns: float = 0.0

    def reckon_ns(self, work: StepWork) -> float:
        """Return what a step takes."""
        return (
            self.step_ns * work.num_steps
            + self.prefill_token_ns * work.num_prefill_tokens
            + self.decode_token_ns * work.num_decode_tokens
            + self.context_token_ns * work.num_context_tokens
            + self.prefill_pair_ns * work.num_prefill_pairs
            + self.copied_block_ns * work.num_copied_blocks
        )


def planned_work(output: SchedulerOutput) -> StepWork:
    """Return the work of a step that is to be run."""
    prefill = decode = context = pairs = 0
    for entry in output.scheduled:
        before, count = entry.num_computed_tokens, entry.num_scheduled_tokens
        if count == 1 and entry.needs_sampling:
            decode += 1
            context += before + 1
        else:
            prefill += count
            pairs += count * before + count * (count + 1) // 2
    return StepWork(bool(output.scheduled), prefill, decode, context, pairs, len(output.swap_outs))


def recorded_work(record: StepRecord) -> StepWork:
    """Return the work of a step that has been run."""
    prefill = decode = context = pairs = 0
    for entry in record.batch:
        before, count = entry.num_computed_before, entry.num_scheduled
        if entry.is_decode:
            decode += 1
            context += before + 1
        else:
            prefill += count
            pairs += count * before + count * (count + 1) // 2
    num_copied = sum(op.kind == BlockOpKind.SWAP_OUT for op in record.block_ops)
    return StepWork(bool(record.batch), prefill, decode, context, pairs, num_copied)


def measured_ns(record: StepRecord) -> int:
    """Return the sum of a step's measured parts."""
    return record.schedule_ns + record.forward_ns + record.sample_ns + record.host_ns


def whole_ns(record: StepRecord, next_t_ns: int) -> int:
    """Return what a step took until the next one began, `next_t_ns` being when that was.

    The loop around the engine takes its time, too. A long pause, and one in which there was nothing to do,
    is not counted.
    """
    parts_ns, elapsed_ns = measured_ns(record), next_t_ns - record.t_ns
    has_work = record.num_running or record.num_waiting
    return elapsed_ns if has_work and parts_ns < elapsed_ns <= parts_ns + MAX_GAP_NS else parts_ns


class CostFit:
    """Takes the records of a session one by one and fits costs to them."""

    def __init__(self) -> None:
        """Start without any."""
        self._previous: StepRecord | None = None
        self._samples: list[tuple[StepWork, int]] = []

    def add(self, record: StepRecord) -> None:
        """Take the next record; one may be missing before it."""
        previous, self._previous = self._previous, record
        if previous is not None and previous.kind == RecordKind.STEP and previous.batch:
            is_next = record.step == previous.step + 1 and record.kind == RecordKind.STEP
            duration_ns = whole_ns(previous, record.t_ns) if is_next else measured_ns(previous)
            self._samples.append((recorded_work(previous), duration_ns))

    @property
    def num_steps(self) -> int:
        """Steps that were taken in."""
        return len(self._samples)

    def fit(self) -> StepCosts:
        """Return the costs; raises `ConfigError` where there are too few steps."""
        return fit_costs(self._samples)


def fit_costs(samples: Sequence[tuple[StepWork, int]]) -> StepCosts:
    """Return the costs that explain steps of known work and duration in ns best.

    Least squares under coefficients that are not negative, each step's squared error over its duration. The
    best such fit is an unconstrained fit of some of the terms; of six terms all choices are tried, which is
    exact and needs no solver. Then all are scaled so that the steps together take as long as they did:
    stalls, which no term explains, are time too. Raises `ConfigError` for fewer than `MIN_STEPS` samples.
    """
    usable = [(work, duration_ns) for work, duration_ns in samples if duration_ns > 0]
    if len(usable) < MIN_STEPS:
        raise ConfigError(f"Only {len(usable)} steps are recorded; costs need {MIN_STEPS} at least.")
    scales = [max(work[term] for work, _ in usable) for term in range(len(StepWork._fields))]
    present = [term for term, scale in enumerate(scales) if scale > 0]
    moments = _moments(usable, present, scales)
    best, best_gain = dict[int, float](), 0.0
    for count in range(1, len(present) + 1):
        for chosen in combinations(range(len(present)), count):
            solution = _solve(moments, chosen)
            if solution is None or min(solution) < 0:
                continue
            gain = sum(value * moments[term][-1] for term, value in zip(chosen, solution, strict=True))
            if gain > best_gain:
                best = {present[term]: value for term, value in zip(chosen, solution, strict=True)}
                best_gain = gain
    values = [best.get(term, 0.0) / (scales[term] or 1) for term in range(len(scales))]
    fitted_ns = sum(value * work[term] for work, _ in usable for term, value in enumerate(values))
    scale = sum(duration_ns for _, duration_ns in usable) / fitted_ns if fitted_ns else 1.0
    names = StepCosts.__struct_fields__
    return StepCosts(**{name: value * scale for name, value in zip(names, values, strict=True)})


def _moments(
    samples: Iterable[tuple[StepWork, int]], terms: list[int], scales: list[int]
) -> list[list[float]]:
    """Return the normal equations: for each term its products with all terms, and with the durations."""
    size = len(terms)
    moments = [[0.0] * (size + 1) for _ in range(size)]
    for work, duration_ns in samples:
        row = [work[term] / scales[term] for term in terms]
        for i, value in enumerate(row):
            if value:
                target, weighted = moments[i], value / duration_ns
                for j, other in enumerate(row):
                    target[j] += weighted * other
                target[size] += value
    return moments


def _solve(moments: list[list[float]], chosen: tuple[int, ...]) -> list[float] | None:
    """Solve the normal equations of some terms by Gaussian elimination; None if they do not determine it."""
    rows = [[moments[i][j] for j in chosen] + [moments[i][-1]] for i in chosen]
    size = len(rows)
    diagonal = [row[index] for index, row in enumerate(rows)]
    for column in range(size):
        pivot = rows[column]
        if pivot[column] <= _SINGULAR * diagonal[column]:  # positive definite: no need to look for a pivot
            return None
        for row in rows[column + 1 :]:
            factor = row[column] / pivot[column]
            for index in range(column, size + 1):
                row[index] -= factor * pivot[index]
    solution = [0.0] * size
    for column in reversed(range(size)):
        known = sum(rows[column][index] * solution[index] for index in range(column + 1, size))
        solution[column] = (rows[column][size] - known) / rows[column][column]
    return solution
