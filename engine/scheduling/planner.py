"""Decides, each step, which tokens of which sequences are computed.

There is no prefill phase and no decode phase. Every sequence has `num_tokens` known tokens and
`num_computed_tokens` whose KV exists, and each step the second number catches up with the first
under one budget of tokens. A long prompt catches up in chunks, a decoding sequence is one token
behind; "prefill" and "decode" are labels for display. First come, first served, no prompt is begun in a step
in which another one ends and it does not: a first token waits for all of its step. (The idea is that of
vLLM's V1 scheduler; paged KV with preemption by recompute or swap: Kwon et al., SOSP 2023, section 4.5.)

Why every step makes progress, and storms of preemptions end: a preempted sequence comes back with the blocks
for `preemption_quantum` more tokens and cannot be preempted before it has generated them. So whoever lacks a
block may be preempted itself, each further preemption of a sequence is paid for with that many tokens, and
the last sequence that runs always has room, since none may be longer than the pool.

Pure and deterministic: no clock, no randomness, no tensors.
"""

from engine.kv.loads import LOAD_DEADLINE_STEPS
from engine.records import StopReason
from engine.scheduling.output import ScheduledSequence, SchedulerOutput
from engine.scheduling.queue import Place
from engine.scheduling.state import SchedulerState
from engine.sequence import Sequence, SequenceStatus


class StepPlanner:
    """Plans one step over the books, and is then thrown away."""

    def __init__(self, state: SchedulerState) -> None:
        """Begin with the whole budget."""
        self._state = state
        self._kv = state.kv
        self._budget = state.config.max_num_batched_tokens
        self._plan: dict[int, ScheduledSequence] = {}
        self._output = SchedulerOutput()
        self._preempted = False
        self._first_interrupted: Place | None = None
        self._has_first_token = False

    def plan(self) -> SchedulerOutput:
        """Choose the step's work: running sequences first, then admissions."""
        output = self._output
        self._schedule_running()
        if self._preempted:
            output.stop_reason = StopReason.NO_FREE_BLOCKS  # the victim waits, at least
        else:
            self._admit_waiting()
        if self._budget and self._state.order.interrupts:
            self._use_rest()
        output.scheduled = list(self._plan.values())
        self._look_ahead()
        output.swap_outs, self._kv.swap_outs = self._kv.swap_outs, []
        output.loads, self._kv.new_loads = self._kv.new_loads, []
        self._await_loads()
        return output

    # ------------------------------------------------------------------ running sequences

    def _schedule_running(self) -> None:
        """Give each running sequence its tokens; one is left for each that comes after it.

        They come in the order of their admission, or of their urgency where that counts: a long prompt of
        little urgency takes what the others leave.
        """
        state = self._state
        block_size, running = state.config.block_size, SequenceStatus.RUNNING
        num_behind = len(state.running)
        is_urgency = state.order.interrupts
        sequences = sorted(state.running, key=state.order.place) if is_urgency else state.running.copy()
        for sequence in sequences:
            num_behind -= 1
            if sequence.status is not running or sequence.load_id:
                continue
            num_computed = sequence.num_computed_tokens
            num_new = min(len(sequence.token_ids) - num_computed, self._budget - num_behind)
            if is_urgency and num_new > 1:
                num_spare = self._budget - num_behind - self._num_wanted_before(sequence)
                num_new = max(1, min(num_new, num_spare))
            if num_computed + num_new > len(sequence.block_table) * block_size and not self._grow(
                sequence, num_computed + num_new
            ):
                continue
            if sequence.has_lookahead:
                sequence.has_lookahead = False
                del state.lookahead[sequence.seq_id]
            self._schedule(sequence, num_computed, num_new)

    def _schedule(self, sequence: Sequence, num_computed: int, num_new: int) -> None:
        entry = self._plan[sequence.seq_id] = ScheduledSequence(sequence, num_computed, num_new)
        self._budget -= num_new
        if num_new > 1 or num_computed < sequence.num_prompt_tokens:
            self._has_first_token |= entry.needs_sampling

    def _num_wanted_before(self, sequence: Sequence) -> int:
        """Count the tokens of waiting sequences that are more urgent than this one, up to the budget."""
        place, num_tokens = self._state.order.place, 0
        end = place(sequence)
        for other in self._state.waiting:
            if place(other) > end or num_tokens >= self._budget:
                break
            num_tokens += len(other.token_ids)
        return num_tokens

    def _use_rest(self) -> None:
        """Let running sequences have what was kept for more urgent ones that could not be admitted."""
        for entry in self._plan.values():
            if self._budget == 0:
                return
            sequence, end = entry.sequence, entry.num_computed_tokens + entry.num_scheduled_tokens
            num_more = min(len(sequence.token_ids) - end, self._budget)
            if num_more and self._kv.try_grow(sequence, end + num_more):
                entry.num_scheduled_tokens += num_more
                self._budget -= num_more

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Get the blocks for `num_tokens`, by preempting if need be; whether the sequence still runs."""
        state = self._state
        if self._kv.try_grow(sequence, num_tokens):
            return True
        num_missing = self._kv.num_blocks_needed(sequence, num_tokens) - self._kv.pool.num_available
        state.take_back_lookahead(num_missing, keeper=sequence)
        while not self._kv.try_grow(sequence, num_tokens):
            candidates = [
                other
                for other in state.running
                if _may_go(other) and state.order.may_displace(sequence, other)
            ]
            victim = state.preempt(sequence, candidates, "block")
            self._preempted = True
            self._unplan(victim)
            if victim is sequence:
                return False
        return True

    def _unplan(self, victim: Sequence) -> None:
        """Take a victim out of the step and its tokens back into the budget."""
        entry = self._plan.pop(victim.seq_id, None)
        if entry is not None:
            self._budget += entry.num_scheduled_tokens

    # ------------------------------------------------------------------ waiting sequences

    def _admit_waiting(self) -> None:
        state, output = self._state, self._output
        for sequence in state.waiting:
            if self._budget == 0 and (state.has_free_slot or not state.order.interrupts):
                output.stop_reason = StopReason.TOKEN_BUDGET
                return  # else one that gives its slot up gives tokens back, too
            if self._is_behind_victim(sequence):
                break
            if self._kv.still_awaits_prefix(sequence):
                self._note_pending(sequence)
                continue
            reason = self._try_admit(sequence)
            if reason is not None:
                output.stop_reason = reason
                return
        if self._preempted:
            is_full = not state.has_free_slot
            output.stop_reason = StopReason.MAX_NUM_SEQS if is_full else StopReason.NO_FREE_BLOCKS

    def _is_behind_victim(self, sequence: Sequence) -> bool:
        """Whether one that has just been interrupted stands before this one in the queue."""
        first = self._first_interrupted
        return first is not None and self._state.order.place(sequence) > first

    def _note_pending(self, sequence: Sequence) -> None:
        self._output.stop_reason = StopReason.PREFIX_PENDING
        self._output.prefix_pending.append(sequence.seq_id)

    def _try_admit(self, sequence: Sequence) -> StopReason | None:
        """Admit the sequence or let it wait for its prefix; or return why nobody more is admitted.

        Lookup, pinning and budget in one go: nothing can evict the hits in between. The whole sequence must
        fit now, not only its first chunk. Nothing is reserved for the rest, but one that could not even run
        alone beside the others would only be preempted. One that was preempted gets all its blocks at once.
        """
        state = self._state
        if not state.has_free_slot and not self._interruptible(sequence):
            return StopReason.MAX_NUM_SEQS
        hits = self._kv.get_computed_blocks(sequence)
        if self._kv.is_prefix_pending(sequence, len(hits)):
            self._note_pending(sequence)
            return None
        if self._would_hold_up(sequence, hits):
            return StopReason.PROMPT_ENDS
        is_full = not state.has_free_slot or self._num_missing(sequence, hits, len(state.running)) > 0
        if is_full and not self._interrupt_for(sequence, hits):
            return self._why_not(sequence, hits)
        # Looked up last: victims that were swapped out may have pushed out what the host tier held.
        self._admit(sequence, hits, self._kv.get_host_blocks(sequence, len(hits)))
        return None

    def _would_hold_up(self, sequence: Sequence, hits: list[int]) -> bool:
        """Whether a part of this prompt would only make a step longer in which another one ends.

        The other's first token waits for the whole step, so what is left of the budget goes to prompts that
        end in it, too; this one begins in the next step. Where urgency counts, nothing is kept from anybody:
        a stream of small urgent prompts would keep a long one waiting until it has aged.
        """
        if not self._has_first_token or self._state.order.interrupts:
            return False
        num_left = len(sequence.token_ids) - len(hits) * self._state.config.block_size
        return num_left > self._budget and not self._kv.get_host_blocks(sequence, len(hits))

    def _num_missing(self, sequence: Sequence, hits: list[int], num_running: int) -> int:
        """Count the blocks that lack for admitting it beside so many others, which keep room to grow."""
        num_tokens = max(len(sequence.token_ids), sequence.safe_tokens)
        reserved = self._state.config.watermark_blocks if num_running else 0
        return self._kv.num_missing(hits, num_tokens, reserved)

    def _why_not(self, sequence: Sequence, hits: list[int]) -> StopReason:
        if not self._state.has_free_slot:
            return StopReason.MAX_NUM_SEQS
        fits_bare = not self._num_missing(sequence, hits, num_running=0)
        return StopReason.WATERMARK if fits_bare else StopReason.NO_FREE_BLOCKS

    def _admit(self, sequence: Sequence, hits: list[int], host_ids: list[int]) -> None:
        block_size = self._state.config.block_size
        num_found = len(hits) * block_size
        num_new = min(len(sequence.token_ids) - num_found, self._budget)
        num_held = num_found + (len(host_ids) * block_size if host_ids else num_new)
        self._state.admit(sequence, hits, host_ids, max(num_held, sequence.safe_tokens))
        if not host_ids:
            self._schedule(sequence, num_found, num_new)

    def _interruptible(self, sequence: Sequence) -> list[Sequence]:
        """Return the running sequences that may have to give way to this one, which waits."""
        order = self._state.order
        if not order.interrupts:
            return []
        running = self._state.running
        return [other for other in running if _may_go(other) and order.may_interrupt(sequence, other)]

    def _interrupt_for(self, sequence: Sequence, hits: list[int]) -> bool:
        """Preempt less urgent sequences until this one has room, or nobody if even all would be too few."""
        state = self._state
        candidates = self._interruptible(sequence)
        tables = [other.block_table for other in candidates]
        num_missing = self._num_missing(sequence, hits, num_running=len(state.running) - len(candidates))
        if not candidates or not self._kv.pool.would_free(tables, hits, num_missing):
            return False
        while not state.has_free_slot or self._num_missing(sequence, hits, len(state.running)):
            need = "room" if state.has_free_slot else "slot"
            victim = state.preempt(sequence, candidates, need)
            candidates.remove(victim)
            self._preempted = True
            self._unplan(victim)
            place = state.order.place(victim)
            self._first_interrupted = min(self._first_interrupted or place, place)
        return True

    # ------------------------------------------------------------------ ahead of need

    def _look_ahead(self) -> None:
        """Reserve the blocks that decoding sequences need in the next step, while blank ones are plenty."""
        config, pool = self._state.config, self._kv.pool
        if not config.lookahead:
            return
        spare = pool.num_free - config.watermark_blocks
        for entry in self._output.scheduled:
            if spare <= 0:
                return
            sequence = entry.sequence
            num_tokens = len(sequence.token_ids)
            if (
                num_tokens == len(sequence.block_table) * config.block_size
                and entry.needs_sampling
                and num_tokens + 1 < sequence.max_num_tokens
            ):
                self._kv.look_ahead(sequence)
                self._state.lookahead[sequence.seq_id] = sequence
                spare -= 1

    def _await_loads(self) -> None:
        """Ask for the copies that are overdue, or for the oldest where there is nothing else to do."""
        loads, output = self._kv.loads, self._output
        for load in loads.values():
            is_first = not output.scheduled and not output.awaited_loads
            if is_first or self._kv.step - load.first_step >= LOAD_DEADLINE_STEPS:
                load.waited = True
                output.awaited_loads.append(load.load_id)


def _may_go(sequence: Sequence) -> bool:
    """Whether a running sequence may be preempted: not while its blocks are written, nor too soon again."""
    return not sequence.load_id and len(sequence.token_ids) >= sequence.safe_tokens
