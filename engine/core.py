"""The engine: scheduler and model runner, one step at a time, every change on record."""

import time
from collections.abc import Callable

from engine.config import EngineConfig
from engine.errors import EngineInvariantError
from engine.records import (
    BatchEntry,
    Finished,
    RecordKind,
    Reset,
    StepRecord,
    StepResult,
    StopReason,
    TokenOutput,
)
from engine.runner.base import ModelRunner
from engine.scheduling.output import SchedulerOutput
from engine.scheduling.scheduler import Scheduler
from engine.sequence import EngineRequest, FinishReason


class EngineCore:
    """Runs sequences on a model. Owned by one thread; nothing in it blocks but the model.

    `add_request`, `abort` and `stop` take effect at once; what they change is in the record of the
    next `step`, or in the one that `flush` returns when there is nothing to run.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        *,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Build an idle engine. `clock_ns` measures durations, `wall_ns` gives Unix time."""
        config.validate()
        self.config = config
        self.runner = runner
        self._clock_ns = clock_ns
        self._wall_ns = wall_ns
        self._step = 0
        self.scheduler = self._make_scheduler()

    def _make_scheduler(self) -> Scheduler:
        return Scheduler(
            self.config, vocab_size=self.runner.vocab_size, eos_token_ids=self.runner.eos_token_ids
        )

    @property
    def has_work(self) -> bool:
        """Whether a step would compute something."""
        return self.scheduler.has_work

    def add_request(self, request: EngineRequest) -> None:
        """Queue one choice of a request; raises `RequestError` if it can never be served."""
        self.scheduler.add(request, self._wall_ns())

    def abort(self, request_id: str) -> None:
        """End all choices of a request at once; unknown ids are ignored."""
        self.scheduler.abort(request_id)

    def stop(self, request_id: str, choice_index: int) -> None:
        """End one choice as complete because its text reached a stop string."""
        self.scheduler.stop(request_id, choice_index)

    def step(self) -> StepResult:
        """Schedule, compute, book; return what changed and the new tokens."""
        t_ns, started = self._wall_ns(), self._clock_ns()
        output = self.scheduler.schedule()
        scheduled = self._clock_ns()
        result = self.runner.execute(output)
        computed = self._clock_ns()
        batch = self.scheduler.update_from_output(output, result.token_ids)
        self._step += 1
        host_ns = self._clock_ns() - computed + (computed - scheduled - result.forward_ns - result.sample_ns)
        durations = (scheduled - started, result.forward_ns, result.sample_ns, host_ns)
        return self._take_result(RecordKind.STEP, t_ns, durations, output, batch)

    def flush(self) -> StepResult | None:
        """Return a record of changes made since the last one, None if there were none."""
        if not self.scheduler.events:
            return None
        self._step += 1
        stop_reason = StopReason.QUEUE_EMPTY if not len(self.scheduler.waiting) else StopReason.PAUSED
        output = SchedulerOutput(stop_reason=stop_reason)
        return self._take_result(RecordKind.CONTROL, self._wall_ns(), (0, 0, 0, 0), output, [])

    def fail_all(self, error: str) -> StepResult:
        """End everything with an error and start over with an empty pool (a step has failed)."""
        events, outputs = self.scheduler.events, self.scheduler.outputs
        for sequence in self.scheduler.open_sequences():
            events.append(
                Finished(sequence.seq_id, sequence.slot, FinishReason.ERROR, sequence.num_output_tokens)
            )
            outputs.append(
                TokenOutput(
                    sequence.seq_id, sequence.request_id, sequence.choice_index, -1, FinishReason.ERROR
                )
            )
        events.append(Reset(error))
        num_arrived = self.scheduler.num_arrived
        self.scheduler = self._make_scheduler()
        self.scheduler.num_arrived = num_arrived
        self.scheduler.events, self.scheduler.outputs = events, outputs
        self.runner.reset()
        result = self.flush()
        if result is None:
            raise EngineInvariantError("a reset left no record")
        return result

    def _take_result(
        self,
        kind: RecordKind,
        t_ns: int,
        durations: tuple[int, int, int, int],
        output: SchedulerOutput,
        batch: list[BatchEntry],
    ) -> StepResult:
        scheduler = self.scheduler
        pool = scheduler.kv.pool
        events, scheduler.events = scheduler.events, []
        outputs, scheduler.outputs = scheduler.outputs, []
        record = StepRecord(
            step=self._step,
            kind=kind,
            t_ns=t_ns,
            schedule_ns=durations[0],
            forward_ns=durations[1],
            sample_ns=durations[2],
            host_ns=durations[3],
            batch=batch,
            block_ops=scheduler.kv.take_ops(),
            events=events,
            stop_reason=output.stop_reason,
            prefix_pending=output.prefix_pending,
            token_budget=self.config.max_num_batched_tokens,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_free=pool.num_free,
            num_cached=pool.num_cached,
            num_used=pool.num_used,
        )
        return StepResult(record, outputs)

    def check_integrity(self) -> None:
        """Raise `EngineInvariantError` if the books do not add up."""
        self.scheduler.check_integrity()
