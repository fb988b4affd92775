"""What recording costs: `python -m bench.recording`.

Runs an engine with a model that costs nothing, so that all that is left is our own work per step,
then builds the record of each step a second time from its parts and times just that. The difference
to a whole step is scheduling and block management, which are there without a record too.
"""

import statistics
import time

import msgspec

from bench.common import percentile, print_table, versions
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.records import BatchEntry, BlockOp, StepRecord, StepResult
from engine.runner.base import LocalRunner, ModelRunnerOutput
from engine.sampling_params import SamplingParams
from engine.scheduling.output import SchedulerOutput
from engine.sequence import EngineRequest
from engine.snapshot import EngineSnapshot

NUM_SEQS = 64
PROMPT_TOKENS = 128
OUTPUT_TOKENS = 256
REPEATS = 20


class InstantRunner(LocalRunner):
    """A model that answers at once."""

    vocab_size = 1000
    eos_token_ids: frozenset[int] = frozenset()

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Return token 1 for all."""
        return ModelRunnerOutput([1] * len(scheduler_output.scheduled), 0, 0)

    def reset(self) -> None:
        """Nothing to forget."""


def main() -> None:
    """Measure and print."""
    config = EngineConfig(num_blocks=4096, max_num_seqs=NUM_SEQS)
    core = EngineCore(config, InstantRunner())
    for index in range(NUM_SEQS):
        core.add_request(
            EngineRequest(
                request_id=f"r{index}",
                prompt_token_ids=[index] * PROMPT_TOKENS,
                sampling_params=SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True),
            )
        )
    results: list[StepResult] = []
    step_us: list[float] = []
    while core.has_work:
        started = time.perf_counter_ns()
        results.append(core.step())
        step_us.append((time.perf_counter_ns() - started) / 1e3)
    full = [index for index, result in enumerate(results) if len(result.record.batch) == NUM_SEQS]
    record_us = [_record_us(results[index].record) for index in full]
    fold_us = _fold_us(config, results, set(full))
    print(versions())
    rows: list[list[object]] = [
        [name, statistics.median(values), percentile(values, 99)]
        for name, values in (
            ("whole step without the model", [step_us[index] for index in full]),
            ("building the record", record_us),
            ("folding it (event loop)", fold_us),
        )
    ]
    print_table([f"at {NUM_SEQS} sequences, {len(full)} steps", "median µs", "p99 µs"], rows)
    sizes = [len(msgspec.msgpack.encode(results[index].record)) for index in full]
    print(f"record size: median {statistics.median(sizes):.0f} bytes as MessagePack")


def _record_us(record: StepRecord) -> float:
    """Time building the record from numbers that the scheduler has in hand."""
    batch = [(e.seq_id, e.slot, e.num_computed_before, e.num_scheduled, e.token_id) for e in record.batch]
    ops = [(op.kind, op.block_id, op.slot, op.arg) for op in record.block_ops]
    fields = msgspec.structs.asdict(record)
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter_ns()
        fields["batch"] = [BatchEntry(a, b, c, d, e) for a, b, c, d, e in batch]
        fields["block_ops"] = [BlockOp(a, b, c, d) for a, b, c, d in ops]
        StepRecord(**fields)
        times.append((time.perf_counter_ns() - started) / 1e3)
    return statistics.median(times)


def _fold_us(config: EngineConfig, results: list[StepResult], counted: set[int]) -> list[float]:
    snapshot = EngineSnapshot(config)
    times = []
    for index, result in enumerate(results):
        started = time.perf_counter_ns()
        snapshot.apply(result.record)
        if index in counted:
            times.append((time.perf_counter_ns() - started) / 1e3)
    return times


if __name__ == "__main__":
    main()
