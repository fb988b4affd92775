"""The scheduler: requests in, each step's plan out, results booked.

Decisions are in `planner`, books in `state`.

Pure and deterministic: whoever calls gives the time; no randomness, no tensors.
"""

import msgspec

from engine.config import EngineConfig
from engine.errors import EngineInvariantError, QueueFullError, RequestError
from engine.records import (
    FAILED_TOKEN_ID,
    Arrived,
    BatchEntry,
    Finished,
    Policies,
    Rejected,
    Stalled,
)
from engine.scheduling.output import SchedulerOutput
from engine.scheduling.planner import StepPlanner
from engine.scheduling.state import SchedulerState, make_output
from engine.scheduling.validation import check_request
from engine.sequence import EngineRequest, FinishReason, Sequence

_NS_PER_S = 1e9


class Scheduler:
    """Decides what the engine computes; `state` holds the books.

    `outputs` are for the callers of the engine; `events`, `batch` and the pool's operations for the record.
    """

    def __init__(self, config: EngineConfig, *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """Start empty."""
        self.config = config
        self.state = SchedulerState(config)
        self.num_arrived = 0
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.state.has_work

    def set_policies(self, policies: Policies) -> None:
        """Decide by other policies from here on; `ConfigError` for names that are not known."""
        msgspec.structs.replace(
            self.config,
            policy=policies.policy,
            preemption=policies.preemption,
            preemption_mode=policies.preemption_mode,
        ).validate()
        self.state.set_policies(policies)

    # ------------------------------------------------------------------ requests

    def add(self, requests: list[EngineRequest], t_ns: int, now_ns: int) -> None:
        """Queue requests, all or none; `RequestError` says why one of them can never be served.

        `t_ns` is Unix time, for the record; `now_ns` the time on a clock that never goes back.
        """
        for index, request in enumerate(requests):
            try:
                check_request(request, self.config, self._vocab_size)
                self._check_room(requests, index)
            except RequestError as error:
                num_tokens = len(request.prompt_token_ids)
                code = error.code or "invalid"
                self.state.events.append(Rejected(request.request_id, request.choice_index, num_tokens, code))
                raise
        for request in requests:
            self._enqueue(request, t_ns, now_ns)

    def _check_room(self, requests: list[EngineRequest], index: int) -> None:
        request = requests[index]
        num_waiting = len(self.state.waiting)
        others = [(other.request_id, other.choice_index) for other in requests[:index]]
        others += [
            (request.request_id, open_.choice_index)
            for open_ in self.state.by_request.get(request.request_id, ())
        ]
        if (request.request_id, request.choice_index) in others:
            raise RequestError(f"Request {request.request_id} is running already.", code="duplicate_request")
        if len(requests) > self.config.max_waiting:
            raise RequestError(
                f"The request asks for {len(requests)} answers; at most {self.config.max_waiting} may wait.",
                param="n",
                code="invalid_value",
            )
        if num_waiting + len(requests) > self.config.max_waiting:
            raise QueueFullError(
                f"The queue is full ({num_waiting} of {self.config.max_waiting}); try again later.",
                code="queue_full",
            )

    def _enqueue(self, request: EngineRequest, t_ns: int, now_ns: int) -> None:
        num_prompt_tokens = len(request.prompt_token_ids)
        max_tokens = self.config.max_model_len - num_prompt_tokens
        if request.sampling_params.max_tokens is not None:
            max_tokens = min(max_tokens, request.sampling_params.max_tokens)
        self.num_arrived += 1
        due_ns = now_ns + round(request.priority * self.config.priority_ageing_s * _NS_PER_S)
        sequence = Sequence(self.num_arrived, request, max_tokens, due_ns)
        self.state.by_request.setdefault(request.request_id, []).append(sequence)
        self.state.waiting.add(sequence)
        self.state.events.append(
            Arrived(
                sequence.seq_id,
                request.request_id,
                request.choice_index,
                num_prompt_tokens,
                max_tokens,
                t_ns,
                request.priority,
                due_ns,
            )
        )

    def abort(self, request_id: str) -> None:
        """End all choices of a request; a request that is not there is none."""
        for sequence in list(self.state.by_request.get(request_id, ())):
            self.state.finish(sequence, FinishReason.ABORT)

    def stop(self, request_id: str, choice_index: int) -> None:
        """End one choice because its text has reached a stop string."""
        for sequence in list(self.state.by_request.get(request_id, ())):
            if sequence.choice_index == choice_index:
                self.state.finish(sequence, FinishReason.STOP)

    # ------------------------------------------------------------------ one step

    def schedule(self, step: int) -> SchedulerOutput:
        """Choose the work of step number `step`.

        If there is work but nothing to do, which must not happen, the first in the queue is ended with an
        error, so that the others go on.
        """
        self.state.kv.step = step
        output = StepPlanner(self.state).plan()
        if not output.scheduled and not output.awaited_loads and self.has_work:
            self._end_stalled()
        return output

    def _end_stalled(self) -> None:
        state = self.state
        head = next(iter([*state.waiting, *state.running]))
        state.events.append(
            Stalled(head.seq_id, len(state.running), len(state.waiting), state.kv.pool.num_available)
        )
        state.finish(head, FinishReason.ERROR)

    # ------------------------------------------------------------------ results

    def update_from_output(
        self, output: SchedulerOutput, token_ids: list[int], finished_loads: list[int]
    ) -> None:
        """Book a computed step: `token_ids[i]` was sampled for `output.scheduled[i]` (-1: none).

        `FAILED_TOKEN_ID` ends a sequence with an error, also where nothing was to be sampled.
        `finished_loads` are the ids of the copies from the host tier that have ended by now.
        """
        self._check_tokens(output, token_ids)
        state = self.state
        for load_id in finished_loads:
            state.finish_load(load_id)
        for entry, token_id in zip(output.scheduled, token_ids, strict=True):
            sequence, num_before = entry.sequence, entry.num_computed_tokens
            num_scheduled = entry.num_scheduled_tokens
            sampled, failed = entry.needs_sampling, token_id == FAILED_TOKEN_ID
            state.batch.append(
                BatchEntry(
                    sequence.seq_id,
                    sequence.slot,
                    num_before,
                    num_scheduled,
                    token_id if sampled and not failed else -1,
                )
            )
            if failed:
                # Its keys and values may be missing: nobody else shall find them.
                state.finish(sequence, FinishReason.ERROR)
                continue
            sequence.num_computed_tokens = num_before + num_scheduled
            state.kv.publish_full_blocks(sequence, num_before)
            if sampled:
                sequence.token_ids.append(token_id)
                self._emit(sequence, token_id)

    def _check_tokens(self, output: SchedulerOutput, token_ids: list[int]) -> None:
        """Look at everything before anything is changed: half a step must not be booked."""
        if len(token_ids) != len(output.scheduled):
            raise EngineInvariantError(f"{len(token_ids)} tokens for {len(output.scheduled)} sequences")
        for entry, token_id in zip(output.scheduled, token_ids, strict=True):
            is_usable = 0 <= token_id < self._vocab_size or token_id == FAILED_TOKEN_ID
            if entry.needs_sampling and not is_usable:
                raise EngineInvariantError(f"sampled token {token_id} is outside the vocabulary")

    def _emit(self, sequence: Sequence, token_id: int) -> None:
        params = sequence.sampling_params
        if token_id in params.stop_token_ids or (token_id in self._eos_token_ids and not params.ignore_eos):
            self.state.finish(sequence, FinishReason.STOP, token_id)
        elif sequence.num_output_tokens >= sequence.max_tokens:
            self.state.finish(sequence, FinishReason.LENGTH, token_id)
        else:
            self.state.outputs.append(make_output(sequence, token_id))

    # ------------------------------------------------------------------ failures and checks

    def fail_all(self) -> None:
        """Note that everything has ended with an error. Only noted: the books may be broken.

        Relies on the index of requests alone, which a sequence leaves last, and completes what a
        failure in the middle of `finish` left half said.
        """
        state = self.state
        given = {output.seq_id for output in state.outputs if output.token_id >= 0}
        state.batch = [
            entry if entry.seq_id in given else msgspec.structs.replace(entry, token_id=-1)
            for entry in state.batch
        ]
        ended = {event.seq_id for event in state.events if isinstance(event, Finished)}
        told = {output.seq_id for output in state.outputs if output.finish_reason is not None}
        for sequence in [sequence for siblings in state.by_request.values() for sequence in siblings]:
            if sequence.seq_id not in ended:
                state.events.append(
                    Finished(sequence.seq_id, sequence.slot, FinishReason.ERROR, sequence.num_output_tokens)
                )
            if sequence.seq_id not in told:
                state.outputs.append(make_output(sequence, -1, FinishReason.ERROR))

    def check_integrity(self) -> None:
        """Raise `EngineInvariantError` unless queues, slots and blocks agree."""
        self.state.check_integrity()
