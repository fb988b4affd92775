"""Decides, each step, which tokens of which sequences are computed.

There is no prefill phase and no decode phase. Every sequence has `num_tokens` known tokens and
`num_computed_tokens` whose KV exists, and each step the second number catches up with the first
under one budget of tokens. A long prompt catches up in chunks, a decoding sequence is one token
behind; "prefill" and "decode" are labels for display. (The idea is that of vLLM's V1 scheduler; paged
KV with preemption by recompute: Kwon et al., SOSP 2023, section 4.5.)

Pure and deterministic: no clock, no randomness, no tensors.
"""

from engine.config import EngineConfig
from engine.errors import ContextLengthError, EngineInvariantError, QueueFullError, RequestError
from engine.kv.cache_manager import KVCacheManager
from engine.records import (
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
from engine.scheduling.queue import WaitingQueue
from engine.sequence import EngineRequest, FinishReason, Sequence, SequenceStatus


class Scheduler:
    """Owns all sequences and, through `kv`, all blocks; nothing else changes them.

    Every change is noted in `events` and in the pool's operations, which the engine core drains
    into the step record.
    """

    def __init__(self, config: EngineConfig, *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """Start empty."""
        self.config = config
        self.kv = KVCacheManager(
            config.num_blocks, config.block_size, enable_prefix_caching=config.enable_prefix_caching
        )
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.events: list[Event] = []
        self.outputs: list[TokenOutput] = []
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

    def add(self, request: EngineRequest, t_ns: int) -> None:
        """Queue one choice of a request; refuse what can never be served (`RequestError`)."""
        try:
            self._check(request)
        except RequestError as error:
            self.events.append(
                Rejected(
                    request.request_id,
                    request.choice_index,
                    len(request.prompt_token_ids),
                    error.code or "invalid",
                )
            )
            raise
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

    def _check(self, request: EngineRequest) -> None:
        request.sampling_params.validate(self._vocab_size)
        token_ids = request.prompt_token_ids
        if not token_ids:
            raise RequestError("The prompt has no tokens.", param="prompt", code="invalid_value")
        if min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            raise RequestError(
                f"The prompt has token ids outside 0 to {self._vocab_size - 1}.",
                param="prompt",
                code="invalid_value",
            )
        if len(token_ids) >= self.config.max_model_len:
            raise ContextLengthError(
                f"The prompt has {len(token_ids)} tokens; at most {self.config.max_model_len - 1} fit, "
                f"since prompt and answer together are limited to {self.config.max_model_len}.",
                param="prompt",
                code="context_length_exceeded",
            )
        if any(
            sequence.choice_index == request.choice_index
            for sequence in self._by_request.get(request.request_id, ())
        ):
            raise RequestError(f"Request {request.request_id} is running already.", code="duplicate_request")
        if len(self.waiting) >= self.config.max_waiting:
            raise QueueFullError(
                f"{len(self.waiting)} requests are waiting already; try again later.", code="queue_full"
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
            output.stop_reason = StopReason.NO_FREE_BLOCKS if len(self.waiting) else StopReason.QUEUE_EMPTY
        else:
            self._admit_waiting(plan, budget, output)
        output.scheduled = list(plan.values())
        output.num_scheduled_tokens = sum(entry.num_scheduled_tokens for entry in output.scheduled)
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
            # Lookup, pinning and budget in one go: nothing can evict the hits in between.
            hits = self.kv.get_computed_blocks(sequence)
            if self.kv.is_prefix_pending(sequence, len(hits)):
                output.stop_reason = StopReason.PREFIX_PENDING
                output.prefix_pending.append(sequence.seq_id)
                if len(output.prefix_pending) >= self.config.max_num_seqs:
                    return  # bounds the lookups of one step; the others keep their place
                continue
            # The whole sequence must fit, not only its first chunk: otherwise two long prompts can
            # each hold half of what they need.
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

    def update_from_output(self, output: SchedulerOutput, token_ids: list[int]) -> list[BatchEntry]:
        """Book a computed step: `token_ids[i]` was sampled for `output.scheduled[i]` (-1: none)."""
        batch: list[BatchEntry] = []
        for entry, token_id in zip(output.scheduled, token_ids, strict=True):
            sequence, num_before = entry.sequence, entry.num_computed_tokens
            sampled = entry.needs_sampling
            if sampled and not 0 <= token_id < self._vocab_size:
                raise EngineInvariantError(f"sampled token {token_id} is outside the vocabulary")
            batch.append(
                BatchEntry(
                    sequence.seq_id,
                    sequence.slot,
                    num_before,
                    entry.num_scheduled_tokens,
                    token_id if sampled else -1,
                )
            )
            sequence.num_computed_tokens = num_before + entry.num_scheduled_tokens
            self.kv.publish_full_blocks(sequence, num_before)
            if sampled:
                sequence.token_ids.append(token_id)
                self._emit(sequence, token_id)
        return batch

    def _emit(self, sequence: Sequence, token_id: int) -> None:
        params = sequence.sampling_params
        reason: FinishReason | None = None
        if token_id in params.stop_token_ids or (token_id in self._eos_token_ids and not params.ignore_eos):
            reason = FinishReason.STOP
        elif sequence.num_output_tokens >= sequence.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._finish(sequence, reason, token_id)
        else:
            self._output(sequence, token_id, None)

    def _finish(self, sequence: Sequence, reason: FinishReason, token_id: int = -1) -> None:
        slot = sequence.slot
        if sequence.status is SequenceStatus.RUNNING:
            self._release(sequence, FreeCause.ABORTED if reason is FinishReason.ABORT else FreeCause.FINISHED)
        else:
            self.waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        siblings = self._by_request[sequence.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._by_request[sequence.request_id]
        self.events.append(Finished(sequence.seq_id, slot, reason, sequence.num_output_tokens))
        self._output(sequence, token_id, reason)

    def _output(self, sequence: Sequence, token_id: int, reason: FinishReason | None) -> None:
        self.outputs.append(
            TokenOutput(
                sequence.seq_id,
                sequence.request_id,
                sequence.choice_index,
                token_id,
                reason,
                sequence.num_cached_tokens,
            )
        )

    def open_sequences(self) -> list[Sequence]:
        """Return all sequences that have not ended, running ones first."""
        return [*self.running, *self.waiting]

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
