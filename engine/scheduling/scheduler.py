"""Decides, each step, which tokens of which sequences are computed.

There is no prefill phase and no decode phase. Every sequence has `num_tokens` known tokens and
`num_computed_tokens` whose KV exists, and each step the second number catches up with the first
under one budget of tokens. A long prompt catches up in chunks, a decoding sequence is one token
behind; "prefill" and "decode" are labels for display. (The idea is that of vLLM's V1 scheduler; paged
KV with preemption by recompute: Kwon et al., SOSP 2023, section 4.5.)

Pure and deterministic: no clock, no randomness, no tensors.
"""

import msgspec

from engine.config import EngineConfig
from engine.errors import EngineInvariantError, QueueFullError, RequestError
from engine.kv.cache_manager import KVCacheManager
from engine.records import (
    FAILED_TOKEN_ID,
    Admitted,
    Arrived,
    BatchEntry,
    Event,
    Finished,
    FreeCause,
    Preempted,
    Rejected,
    StopReason,
    TokenOutput,
)
from engine.scheduling.output import ScheduledSequence, SchedulerOutput
from engine.scheduling.preemption import choose_victim, make_preemption_policy
from engine.scheduling.queue import make_waiting_queue
from engine.scheduling.validation import check_request
from engine.sequence import EngineRequest, FinishReason, Sequence, SequenceStatus


class Scheduler:
    """Owns all sequences and, through `kv`, all blocks; nothing else changes them.

    Every change is noted in `events`, `batch` and the pool's operations, which the engine core drains
    into the step record; `outputs` are for the callers of the engine.
    """

    def __init__(self, config: EngineConfig, *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """Start empty."""
        self.config = config
        self.kv = KVCacheManager(
            config.num_blocks, config.block_size, enable_prefix_caching=config.enable_prefix_caching
        )
        self.waiting = make_waiting_queue(config.policy)
        self.running: list[Sequence] = []
        self.events: list[Event] = []
        self.outputs: list[TokenOutput] = []
        self.batch: list[BatchEntry] = []
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._preemption = make_preemption_policy(config.preemption)
        self._free_slots = set(range(config.max_num_seqs))
        self._by_request: dict[str, list[Sequence]] = {}
        self.num_arrived = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.running) or len(self.waiting) > 0

    # ------------------------------------------------------------------ requests

    def add(self, requests: list[EngineRequest], t_ns: int) -> None:
        """Queue requests, all or none; `RequestError` says why one of them can never be served."""
        for index, request in enumerate(requests):
            try:
                check_request(request, self.config, self._vocab_size)
                self._check_room(requests, index)
            except RequestError as error:
                num_tokens = len(request.prompt_token_ids)
                code = error.code or "invalid"
                self.events.append(Rejected(request.request_id, request.choice_index, num_tokens, code))
                raise
        for request in requests:
            self._enqueue(request, t_ns)

    def _check_room(self, requests: list[EngineRequest], index: int) -> None:
        request = requests[index]
        others = [(other.request_id, other.choice_index) for other in requests[:index]]
        others += [
            (request.request_id, open_.choice_index) for open_ in self._by_request.get(request.request_id, ())
        ]
        if (request.request_id, request.choice_index) in others:
            raise RequestError(f"Request {request.request_id} is running already.", code="duplicate_request")
        if len(requests) > self.config.max_waiting:
            raise RequestError(
                f"The request asks for {len(requests)} answers; at most {self.config.max_waiting} may wait.",
                param="n",
                code="invalid_value",
            )
        if len(self.waiting) + len(requests) > self.config.max_waiting:
            raise QueueFullError(
                f"The queue is full ({len(self.waiting)} of {self.config.max_waiting}); try again later.",
                code="queue_full",
            )

    def _enqueue(self, request: EngineRequest, t_ns: int) -> None:
        num_prompt_tokens = len(request.prompt_token_ids)
        max_tokens = self.config.max_model_len - num_prompt_tokens
        if request.sampling_params.max_tokens is not None:
            max_tokens = min(max_tokens, request.sampling_params.max_tokens)
        self.num_arrived += 1
        sequence = Sequence(self.num_arrived, request, max_tokens)
        self._by_request.setdefault(request.request_id, []).append(sequence)
        self.waiting.add(sequence)
        self.events.append(
            Arrived(
                sequence.seq_id, request.request_id, request.choice_index, num_prompt_tokens, max_tokens, t_ns
            )
        )

    def abort(self, request_id: str) -> None:
        """End all choices of a request; a request that is not there is none."""
        for sequence in list(self._by_request.get(request_id, ())):
            self._finish(sequence, FinishReason.ABORT)

    def stop(self, request_id: str, choice_index: int) -> None:
        """End one choice because its text has reached a stop string."""
        for sequence in list(self._by_request.get(request_id, ())):
            if sequence.choice_index == choice_index:
                self._finish(sequence, FinishReason.STOP)

    # ------------------------------------------------------------------ one step

    def schedule(self) -> SchedulerOutput:
        """Choose the step's work: running sequences first, then admissions."""
        plan: dict[int, ScheduledSequence] = {}
        budget, preempted = self._schedule_running(plan)
        output = SchedulerOutput()
        if preempted:
            output.stop_reason = StopReason.NO_FREE_BLOCKS  # the victim waits, at least
        else:
            self._admit_waiting(plan, budget, output)
        output.scheduled = list(plan.values())
        if not output.scheduled and self.has_work:
            raise EngineInvariantError("there is work but no step to make")
        return output

    def _schedule_running(self, plan: dict[int, ScheduledSequence]) -> tuple[int, bool]:
        budget, preempted = self.config.max_num_batched_tokens, False
        for sequence in self.running.copy():
            if sequence.status is not SequenceStatus.RUNNING or budget == 0:
                continue
            num_new = min(sequence.num_tokens - sequence.num_computed_tokens, budget)
            while not self.kv.try_grow(sequence, sequence.num_computed_tokens + num_new):
                preempted = True
                victim = self._preempt(sequence)
                if victim.seq_id in plan:
                    budget += plan.pop(victim.seq_id).num_scheduled_tokens
                if victim is sequence:
                    break
            else:
                plan[sequence.seq_id] = ScheduledSequence(sequence, sequence.num_computed_tokens, num_new)
                budget -= num_new
        return budget, preempted

    def _admit_waiting(
        self, plan: dict[int, ScheduledSequence], budget: int, output: SchedulerOutput
    ) -> None:
        for sequence in self.waiting:
            if budget == 0:
                output.stop_reason = StopReason.TOKEN_BUDGET
                return
            if len(self.running) >= self.config.max_num_seqs:
                output.stop_reason = StopReason.MAX_NUM_SEQS
                return
            if self.kv.still_awaits_prefix(sequence):
                self._note_pending(sequence, output)
                continue
            # Lookup, pinning and budget in one go: nothing can evict the hits in between.
            hits = self.kv.get_computed_blocks(sequence)
            if self.kv.is_prefix_pending(sequence, len(hits)):
                self._note_pending(sequence, output)
                continue
            # The whole sequence must fit now, not only its first chunk. Nothing is reserved for the
            # rest, but one that could not even run alone beside the others would only be preempted.
            reserved = self.config.watermark_blocks if self.running else 0
            if not self.kv.can_admit(hits, sequence.num_tokens, reserved):
                fits_bare = reserved and self.kv.can_admit(hits, sequence.num_tokens, 0)
                output.stop_reason = StopReason.WATERMARK if fits_bare else StopReason.NO_FREE_BLOCKS
                return
            num_cached = len(hits) * self.config.block_size
            num_new = min(sequence.num_tokens - num_cached, budget)
            self._admit(sequence, hits, num_cached + num_new)
            plan[sequence.seq_id] = ScheduledSequence(sequence, num_cached, num_new)
            budget -= num_new

    @staticmethod
    def _note_pending(sequence: Sequence, output: SchedulerOutput) -> None:
        output.stop_reason = StopReason.PREFIX_PENDING
        output.prefix_pending.append(sequence.seq_id)

    def _admit(self, sequence: Sequence, hits: list[int], num_tokens: int) -> None:
        self.waiting.remove(sequence)
        slot = sequence.last_slot if sequence.last_slot in self._free_slots else min(self._free_slots)
        self._free_slots.remove(slot)
        sequence.slot = sequence.last_slot = slot
        self.kv.admit(sequence, hits, num_tokens)
        sequence.status = SequenceStatus.RUNNING
        num_cached = len(hits) * self.config.block_size
        sequence.num_computed_tokens = num_cached
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = num_cached
        self.running.append(sequence)
        self.events.append(
            Admitted(sequence.seq_id, slot, sequence.num_tokens, num_cached, sequence.num_preemptions > 0)
        )

    def _preempt(self, beneficiary: Sequence) -> Sequence:
        victim, candidates = choose_victim(self._preemption, self.running)
        slot, num_lost = victim.slot, victim.num_computed_tokens
        num_freed = self._release(victim, FreeCause.PREEMPTED)
        victim.status = SequenceStatus.WAITING
        victim.num_preemptions += 1
        self.waiting.add(victim)
        self.events.append(
            Preempted(
                seq_id=victim.seq_id,
                slot=slot,
                policy=self._preemption.name,
                mode="recompute",
                num_tokens_lost=num_lost,
                num_blocks_freed=num_freed,
                beneficiary=beneficiary.seq_id,
                candidates=candidates,
            )
        )
        return victim

    def _release(self, sequence: Sequence, cause: FreeCause) -> int:
        """Take a running sequence's blocks and slot; return how many blocks became available."""
        num_freed = self.kv.free(sequence, cause)
        self.running.remove(sequence)
        self._free_slots.add(sequence.slot)
        sequence.slot = -1
        sequence.num_computed_tokens = 0
        return num_freed

    # ------------------------------------------------------------------ results

    def update_from_output(self, output: SchedulerOutput, token_ids: list[int]) -> None:
        """Book a computed step: `token_ids[i]` was sampled for `output.scheduled[i]` (-1: none)."""
        self._check_tokens(output, token_ids)
        for entry, token_id in zip(output.scheduled, token_ids, strict=True):
            sequence, num_before = entry.sequence, entry.num_computed_tokens
            num_scheduled = entry.num_scheduled_tokens
            sampled = entry.needs_sampling
            self.batch.append(
                BatchEntry(
                    sequence.seq_id,
                    sequence.slot,
                    num_before,
                    num_scheduled,
                    token_id if sampled and token_id != FAILED_TOKEN_ID else -1,
                )
            )
            sequence.num_computed_tokens = num_before + num_scheduled
            self.kv.publish_full_blocks(sequence, num_before)
            if sampled and token_id == FAILED_TOKEN_ID:
                self._finish(sequence, FinishReason.ERROR)
            elif sampled:
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
            self._finish(sequence, FinishReason.STOP, token_id)
        elif sequence.num_output_tokens >= sequence.max_tokens:
            self._finish(sequence, FinishReason.LENGTH, token_id)
        else:
            self.outputs.append(_make_output(sequence, token_id))

    def _finish(self, sequence: Sequence, reason: FinishReason, token_id: int = -1) -> None:
        slot = sequence.slot
        if sequence.status is SequenceStatus.RUNNING:
            self._release(sequence, FreeCause.ABORTED if reason is FinishReason.ABORT else FreeCause.FINISHED)
        else:
            self.waiting.remove(sequence)
        self.events.append(Finished(sequence.seq_id, slot, reason, sequence.num_output_tokens))
        self.outputs.append(_make_output(sequence, token_id, reason))
        # Last, so that `fail_all` finds whatever has not been told that it ended.
        sequence.status = SequenceStatus.FINISHED
        siblings = self._by_request[sequence.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._by_request[sequence.request_id]

    def fail_all(self) -> None:
        """Note that everything has ended with an error. Only noted: the books may be broken.

        Relies on the index of requests alone, which a sequence leaves last, and completes what a
        failure in the middle of `_finish` left half said.
        """
        given = {output.seq_id for output in self.outputs if output.token_id >= 0}
        self.batch = [
            entry if entry.seq_id in given else msgspec.structs.replace(entry, token_id=-1)
            for entry in self.batch
        ]
        ended = {event.seq_id for event in self.events if isinstance(event, Finished)}
        told = {output.seq_id for output in self.outputs if output.finish_reason is not None}
        for sequence in [sequence for siblings in self._by_request.values() for sequence in siblings]:
            if sequence.seq_id not in ended:
                self.events.append(
                    Finished(sequence.seq_id, sequence.slot, FinishReason.ERROR, sequence.num_output_tokens)
                )
            if sequence.seq_id not in told:
                self.outputs.append(_make_output(sequence, -1, FinishReason.ERROR))

    def check_integrity(self) -> None:
        """Raise `EngineInvariantError` unless queues, slots and blocks agree."""
        waiting = list(self.waiting)
        self.kv.check_integrity(self.running, waiting)
        slots = [sequence.slot for sequence in self.running]
        if len(set(slots)) != len(slots) or self._free_slots.intersection(slots):
            raise EngineInvariantError(f"slots are not disjoint: {slots}, free {self._free_slots}")
        if len(slots) + len(self._free_slots) != self.config.max_num_seqs:
            raise EngineInvariantError("a slot is lost")
        known = {sequence.seq_id for sequences in self._by_request.values() for sequence in sequences}
        if known != {sequence.seq_id for sequence in [*self.running, *waiting]}:
            raise EngineInvariantError("the request index and the queues disagree")
        if any(sequence.status is not SequenceStatus.RUNNING for sequence in self.running) or any(
            sequence.status is not SequenceStatus.WAITING for sequence in waiting
        ):
            raise EngineInvariantError("a sequence is in a queue that its status does not name")


def _make_output(sequence: Sequence, token_id: int, reason: FinishReason | None = None) -> TokenOutput:
    return TokenOutput(
        sequence.seq_id,
        sequence.request_id,
        sequence.choice_index,
        token_id,
        reason,
        sequence.num_cached_tokens,
    )
