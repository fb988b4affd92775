"""The engine: scheduler and model runner, one step at a time, every change on record."""

import time
from collections.abc import Callable

from engine.config import EngineConfig
from engine.errors import EngineInvariantError, RankError
from engine.records import Policies, RecordKind, Reset, StepRecord, StepResult
from engine.runner.base import ModelRunner
from engine.scheduling.output import SchedulerOutput
from engine.scheduling.scheduler import Scheduler
from engine.sequence import EngineRequest


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
        self._is_runner_stale = False
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
        self.add_requests([request])

    def add_requests(self, requests: list[EngineRequest]) -> None:
        """Queue all choices of a request, or none: raises `RequestError` if one can never be served."""
        self.scheduler.add(requests, self._wall_ns(), self._clock_ns())

    def abort(self, request_id: str) -> None:
        """End all choices of a request at once; unknown ids are ignored."""
        self.scheduler.abort(request_id)

    def stop(self, request_id: str, choice_index: int) -> None:
        """End one choice as complete because its text reached a stop string."""
        self.scheduler.stop(request_id, choice_index)

    @property
    def policies(self) -> Policies:
        """The policies that are in force; `set_policies` may have changed those of `config`."""
        return self.scheduler.state.policies

    def set_policies(self, policies: Policies) -> None:
        """Decide by other policies from the next step on; raises `ConfigError` for unknown names."""
        self.scheduler.set_policies(policies)

    def step(self) -> StepResult:
        """Schedule, compute, book; return what changed and the new tokens."""
        self.reset_runner()
        t_ns, started = self._wall_ns(), self._clock_ns()
        output = self.scheduler.schedule(self._step + 1)
        scheduled = self._clock_ns()
        result = self.runner.execute(output)
        self.scheduler.update_from_output(output, result.token_ids, result.finished_loads)
        model_ns = result.forward_ns + result.sample_ns
        host_ns = self._clock_ns() - scheduled - model_ns
        durations = (scheduled - started, result.forward_ns, result.sample_ns, host_ns)
        return self._take_result(RecordKind.STEP, t_ns, durations, output)

    def flush(self) -> StepResult | None:
        """Return a record of what changed since the last one, None if nothing did.

        For an engine that has no work; one that has says it with its next step.
        """
        if self.has_work:
            raise EngineInvariantError("there is work: step, do not flush")
        if not self.scheduler.state.events:
            return None
        return self._take_result(RecordKind.CONTROL, self._wall_ns(), (0, 0, 0, 0), SchedulerOutput())

    def fail_all(self, error: str) -> StepResult:
        """End everything with an error and start over with an empty pool (a step has failed).

        What the failed step had booked stays in the record; block operations are void after a reset. The
        runner is reset later, by `reset_runner`: that may take long or fail, which must not keep back the
        record. If this itself fails, calling it once more says all that has not been said.
        """
        failed = self.scheduler
        self._is_runner_stale = True
        failed.fail_all()
        fresh = self._make_scheduler()
        fresh.num_arrived = failed.num_arrived
        fresh.state.set_policies(failed.state.policies)
        fresh.state.events = [*failed.state.events, Reset(error)]
        fresh.state.outputs, fresh.state.batch = failed.state.outputs, failed.state.batch
        self.scheduler = fresh
        return self._take_result(RecordKind.CONTROL, self._wall_ns(), (0, 0, 0, 0), SchedulerOutput())

    def reset_runner(self, on_wait: Callable[[], None] = lambda: None) -> None:
        """Have the runner get back what it has lost and forget what it had before `fail_all`, unless it has.

        No step runs before that. Calls `on_wait` while it takes long. Raises what `on_wait` raises, and
        whatever the runner raises if it cannot be used any more.
        """
        if self._is_runner_stale:
            self.runner.recover(on_wait)
            self.runner.reset()
            self._is_runner_stale = False

    def check_runner(self) -> None:
        """Raise `RankError` if the runner has lost something that it needs, also between steps."""
        if self.runner.loss is not None:
            raise RankError(self.runner.loss)

    def close(self) -> None:
        """End whatever the runner has beside this thread; nothing can be computed any more."""
        self.runner.close()

    def _take_result(
        self, kind: RecordKind, t_ns: int, durations: tuple[int, int, int, int], output: SchedulerOutput
    ) -> StepResult:
        state = self.scheduler.state
        pool, host = state.kv.pool, state.kv.host
        record = StepRecord(
            step=self._step + 1,
            kind=kind,
            t_ns=t_ns,
            schedule_ns=durations[0],
            forward_ns=durations[1],
            sample_ns=durations[2],
            host_ns=durations[3],
            batch=state.batch,
            block_ops=pool.ops,
            events=state.events,
            stop_reason=output.stop_reason,
            prefix_pending=output.prefix_pending,
            token_budget=self.config.max_num_batched_tokens,
            num_running=len(state.running),
            num_waiting=len(state.waiting),
            num_free=pool.num_free,
            num_cached=pool.num_cached,
            num_used=pool.num_used,
            num_host_used=host.num_used,
            num_host_pinned=host.num_pinned,
        )
        result = StepResult(record, state.outputs)
        # Only now, when the record exists: a number or an event without a record would be lost.
        self._step += 1
        state.batch, state.events, state.outputs, pool.ops = [], [], [], []
        return result

    def check_integrity(self) -> None:
        """Raise `EngineInvariantError` if the books do not add up."""
        self.scheduler.check_integrity()
