"""The scheduler's books: all sequences, where each is, and the moves from one place to another.

Every move notes what it changed in `events`, `batch` or the pool's operations, which the engine core drains
into the step record. What to move when is decided in `planner`.
"""

from engine.config import EngineConfig
from engine.errors import EngineInvariantError
from engine.kv.cache_manager import KVCacheManager
from engine.records import (
    Admitted,
    BatchEntry,
    Event,
    Finished,
    FreeCause,
    Loaded,
    Policies,
    Preempted,
    TokenOutput,
)
from engine.scheduling.preemption import choose_victim, is_swap_better, make_preemption_policy, reckon_costs
from engine.scheduling.queue import WaitingQueue, make_queue_order
from engine.sequence import FinishReason, Sequence, SequenceStatus


class SchedulerState:
    """Owns all sequences and, through `kv`, all blocks; nothing else changes them."""

    def __init__(self, config: EngineConfig) -> None:
        """Start empty."""
        self.config = config
        self.kv = KVCacheManager(
            config.num_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            num_host_blocks=config.num_host_blocks,
            offload=config.offload,
        )
        self.policies = Policies(config.policy, config.preemption, config.preemption_mode)
        self.order = make_queue_order(config.policy)
        self.preemption = make_preemption_policy(config.preemption)
        self.waiting = WaitingQueue(self.order)
        self.running: list[Sequence] = []
        self.lookahead: dict[int, Sequence] = {}
        """By seq_id, those that hold a block ahead of need, the newest last."""

        self.events: list[Event] = []
        self.outputs: list[TokenOutput] = []
        self.batch: list[BatchEntry] = []
        self.by_request: dict[str, list[Sequence]] = {}
        self._free_slots = set(range(config.max_num_seqs))

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything; a copy that nobody waits for any more counts, too."""
        return bool(self.running) or len(self.waiting) > 0 or bool(self.kv.loads)

    @property
    def has_free_slot(self) -> bool:
        """Whether one more sequence may run."""
        return bool(self._free_slots)

    def set_policies(self, policies: Policies) -> None:
        """Decide by other policies from here on; raises `ConfigError` for unknown names."""
        order, preemption = make_queue_order(policies.policy), make_preemption_policy(policies.preemption)
        self.order, self.preemption, self.policies = order, preemption, policies
        self.waiting.reorder(order)
        self.events.append(policies)

    # ------------------------------------------------------------------ moves

    def admit(self, sequence: Sequence, hits: list[int], host_ids: list[int], num_tokens: int) -> None:
        """Give a waiting sequence a slot, its hits, and blocks for `num_tokens`; begin loading `host_ids`."""
        self.waiting.remove(sequence)
        slot = sequence.last_slot if sequence.last_slot in self._free_slots else min(self._free_slots)
        self._free_slots.remove(slot)
        sequence.slot = sequence.last_slot = slot
        block_size = self.config.block_size
        num_cached, num_host = len(hits) * block_size, len(host_ids) * block_size
        miss = self.kv.explain_miss(sequence, len(hits) + len(host_ids))
        self.kv.admit(sequence, hits, host_ids, num_tokens)
        sequence.status = SequenceStatus.RUNNING
        sequence.num_computed_tokens = num_cached
        is_resumed = sequence.num_preemptions > 0
        if not is_resumed:
            sequence.num_cached_tokens = num_cached + num_host
        self.running.append(sequence)
        self.events.append(
            Admitted(sequence.seq_id, slot, sequence.num_tokens, num_cached, is_resumed, num_host, miss)
        )

    def preempt(self, beneficiary: Sequence, candidates: list[Sequence], need: str) -> Sequence:
        """Take the blocks of one of the candidates for the benefit of another sequence; return the victim.

        `need` is what `Preempted` says.
        """
        victim, scores = choose_victim(self.preemption, candidates, self.order.rank)
        slot, num_computed = victim.slot, victim.num_computed_tokens
        costs = reckon_costs(self.config, num_computed, num_computed // self.config.block_size)
        num_kept = 0
        if is_swap_better(self.config, self.policies.preemption_mode, costs):
            num_kept = self.kv.swap_out(victim) * self.config.block_size
        victim.safe_tokens = min(victim.num_tokens + self.config.preemption_quantum, victim.max_num_tokens)
        num_freed = self._release(victim, FreeCause.PREEMPTED)
        victim.status = SequenceStatus.WAITING
        victim.num_preemptions += 1
        self.waiting.add(victim)
        self.events.append(
            Preempted(
                seq_id=victim.seq_id,
                slot=slot,
                policy=self.preemption.name,
                mode="swap" if num_kept else "recompute",
                num_tokens_lost=num_computed - num_kept,
                num_blocks_freed=num_freed,
                beneficiary=beneficiary.seq_id,
                candidates=scores,
                num_tokens_kept=num_kept,
                recompute_ns=costs[0],
                swap_ns=costs[1],
                need=need,
            )
        )
        return victim

    def finish(self, sequence: Sequence, reason: FinishReason, token_id: int = -1) -> None:
        """End a sequence, running or waiting; `token_id` is its last token, -1 if this step gave none."""
        slot = sequence.slot
        if sequence.status is SequenceStatus.RUNNING:
            self._release(sequence, FreeCause.ABORTED if reason is FinishReason.ABORT else FreeCause.FINISHED)
        else:
            self.waiting.remove(sequence)
            self.kv.release_pins(sequence)
        self.events.append(Finished(sequence.seq_id, slot, reason, sequence.num_output_tokens))
        self.outputs.append(make_output(sequence, token_id, reason))
        # Last, so that `fail_all` finds whatever has not been told that it ended.
        sequence.status = SequenceStatus.FINISHED
        siblings = self.by_request[sequence.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self.by_request[sequence.request_id]

    def finish_load(self, load_id: int) -> None:
        """Book that a copy from the host tier has ended; one that is not known is none."""
        load = self.kv.loads.get(load_id)
        if load is None:
            return
        num_tokens = 0
        self.kv.finish_load(load)
        if load.is_orphan:
            self._free_slots.add(load.slot)
        else:
            sequence = next(sequence for sequence in self.running if sequence.load_id == load_id)
            num_before = sequence.num_computed_tokens
            num_tokens = num_before + len(load.pairs) * self.config.block_size
            sequence.load_id = 0
            sequence.num_computed_tokens = num_tokens
            self.kv.publish_full_blocks(sequence, num_before)
        self.events.append(
            Loaded(
                seq_id=load.owner,
                slot=load.slot,
                num_tokens=num_tokens,
                num_blocks=len(load.pairs),
                num_steps=self.kv.step - load.first_step + 1,
                waited=load.waited,
                is_orphan=load.is_orphan,
            )
        )

    def take_back_lookahead(self, num_missing: int, keeper: Sequence | None = None) -> None:
        """Take blocks back that were reserved ahead of need, newest first, all but the keeper's."""
        for sequence in list(reversed(self.lookahead.values())):
            if num_missing <= 0:
                return
            if sequence is not keeper:
                self.kv.take_back_lookahead(sequence)
                del self.lookahead[sequence.seq_id]
                num_missing -= 1

    def _release(self, sequence: Sequence, cause: FreeCause) -> int:
        """Take a running sequence's blocks and slot; return how many blocks became available."""
        self.lookahead.pop(sequence.seq_id, None)
        is_loading = sequence.load_id != 0
        num_freed = self.kv.free(sequence, cause)
        self.running.remove(sequence)
        if not is_loading:  # else the slot's table still has the blocks that the copy writes to
            self._free_slots.add(sequence.slot)
        sequence.slot = -1
        sequence.num_computed_tokens = 0
        return num_freed

    # ------------------------------------------------------------------ checks

    def check_integrity(self) -> None:
        """Raise `EngineInvariantError` unless queues, slots and blocks agree."""
        waiting = list(self.waiting)
        self.kv.check_integrity(self.running, waiting)
        slots = [sequence.slot for sequence in self.running]
        slots += [load.slot for load in self.kv.loads.values() if load.is_orphan]
        if len(set(slots)) != len(slots) or self._free_slots.intersection(slots):
            raise EngineInvariantError(f"slots are not disjoint: {slots}, free {self._free_slots}")
        if len(slots) + len(self._free_slots) != self.config.max_num_seqs:
            raise EngineInvariantError("a slot is lost")
        known = {sequence.seq_id for sequences in self.by_request.values() for sequence in sequences}
        if known != {sequence.seq_id for sequence in [*self.running, *waiting]}:
            raise EngineInvariantError("the request index and the queues disagree")
        if any(sequence.status is not SequenceStatus.RUNNING for sequence in self.running) or any(
            sequence.status is not SequenceStatus.WAITING for sequence in waiting
        ):
            raise EngineInvariantError("a sequence is in a queue that its status does not name")
        ahead = {sequence.seq_id for sequence in self.running if sequence.has_lookahead}
        if ahead != set(self.lookahead):
            raise EngineInvariantError("the list of blocks reserved ahead is wrong")


def make_output(sequence: Sequence, token_id: int, reason: FinishReason | None = None) -> TokenOutput:
    """Return what the engine's caller is told of one sequence."""
    return TokenOutput(
        sequence.seq_id,
        sequence.request_id,
        sequence.choice_index,
        token_id,
        reason,
        sequence.num_cached_tokens,
    )
