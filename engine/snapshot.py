"""The engine's visible state as a pure fold over step records.

`EngineSnapshot.apply(record)` is the only way the state moves: the live page, replay and the tests
use the same fold, and `engine.core` can make a snapshot of its own books to compare it with.
"""

from collections.abc import Sequence
from typing import Any, Self

import msgspec

from engine.config import EngineConfig
from engine.errors import EngineInvariantError
from engine.records import (
    Admitted,
    Arrived,
    BatchEntry,
    BlockOp,
    BlockOpKind,
    Event,
    Finished,
    FreeCause,
    Loaded,
    Policies,
    Preempted,
    Rejected,
    Reset,
    Stalled,
    StepRecord,
    StopReason,
)
from engine.sequence import FinishReason
from engine.snapshot_data import SnapshotState, batch_to_dict, pack, sequence_to_dict, unpack
from engine.views import BlockState, BlockView, SequenceView, Totals

PRIORITY_POLICY = "priority"


class EngineSnapshot:
    """State after step `step`. Not thread-safe; one owner folds it."""

    def __init__(self, config: EngineConfig) -> None:
        """Start before the first record: no sequences, all blocks blank."""
        self.config = config
        self.step = 0
        self.t_ns = 0
        self.last_record: StepRecord | None = None
        self.last_batch: StepRecord | None = None
        self.totals = Totals()
        self.policies = Policies(config.policy, config.preemption, config.preemption_mode)
        self._clear()

    def _clear(self) -> None:
        num_blocks = self.config.num_blocks
        self.sequences: dict[int, SequenceView] = {}
        self.num_free, self.num_cached, self.num_used = num_blocks, 0, 0
        self._running: dict[int, SequenceView] = {}  # by seq_id, in order of admission
        self._by_slot: dict[int, int] = {}  # slot -> seq_id
        self._holders: dict[int, list[int]] = {}  # block -> slots, oldest first; only held blocks
        self._tables: dict[int, list[int]] = {}  # slot -> blocks
        self._filled = [0] * num_blocks
        self._hashes = [0] * num_blocks
        self._last_slot = [-1] * num_blocks

    # ------------------------------------------------------------------ reading

    @property
    def running(self) -> list[SequenceView]:
        """Sequences with a slot, in order of admission."""
        return list(self._running.values())

    @property
    def waiting(self) -> list[SequenceView]:
        """Sequences without a slot, in the order in which they are considered, each with its reason.

        Who arrived earlier than the first in the queue but stands behind it waits for "priority".
        """
        views = sorted((view for view in self.sequences.values() if view.slot < 0), key=self._place)
        if self.last_record is not None:
            pending = set(self.last_record.prefix_pending)
            reason = StopReason(self.last_record.stop_reason).name.lower()
            head = next((view.seq_id for view in views if view.seq_id not in pending), 0)
            for view in views:
                if view.seq_id in pending:
                    view.reason = StopReason.PREFIX_PENDING.name.lower()
                else:
                    view.reason = StopReason.PRIORITY.name.lower() if view.seq_id < head else reason
        return views

    def _place(self, view: SequenceView) -> tuple[int, int]:
        return view.due_ns if self.policies.policy == PRIORITY_POLICY else 0, view.seq_id

    @property
    def host_counts(self) -> dict[str, int]:
        """Blocks of the host tier: in all, holding something, and of these kept for a sequence or a copy."""
        record = self.last_record
        return {
            "total": self.config.num_host_blocks,
            "used": record.num_host_used if record else 0,
            "pinned": record.num_host_pinned if record else 0,
        }

    def block(self, block_id: int) -> BlockView:
        """Describe one block."""
        holders = self._holders.get(block_id)
        if holders is None:
            if self._hashes[block_id]:
                state, slot, filled = BlockState.CACHED, self._last_slot[block_id], self._filled[block_id]
            else:
                state, slot, filled = BlockState.FREE, -1, 0
            return BlockView(state, 0, slot, -1, filled, self._hashes[block_id])
        filled = self._filled[block_id]
        if len(holders) > 1:
            state = BlockState.SHARED
        elif filled == 0:
            state = BlockState.RESERVED
        else:
            state = BlockState.ACTIVE if filled == self.config.block_size else BlockState.TAIL
        owner = self._by_slot.get(holders[0], -1)  # -1: its sequence has ended, a copy still writes to it
        return BlockView(state, len(holders), holders[0], owner, filled, self._hashes[block_id])

    def to_dict(self, *, with_blocks: bool = True) -> dict[str, Any]:
        """Return the state as JSON-able data (`GET /api/engine/state`)."""
        state: dict[str, Any] = {
            "step": self.step,
            "t_ns": self.t_ns,
            "config": msgspec.to_builtins(self.config),
            "counts": {
                "total": self.config.num_blocks,
                "free": self.num_free,
                "cached": self.num_cached,
                "used": self.num_used,
            },
            "running": [sequence_to_dict(view) for view in self._running.values()],
            "waiting": [sequence_to_dict(view) for view in self.waiting],
            "batch": batch_to_dict(self.last_batch),
            "totals": msgspec.to_builtins(self.totals),
            "policies": msgspec.structs.asdict(self.policies),
            "host": self.host_counts,
        }
        if with_blocks:
            state["blocks"] = [self.block_to_dict(block_id) for block_id in range(self.config.num_blocks)]
        return state

    def block_to_dict(self, block_id: int) -> dict[str, Any]:
        """Return one entry of `to_dict()["blocks"]`."""
        view = self.block(block_id)
        return {
            "id": block_id,
            "state": view.state.name.lower(),
            "ref_cnt": view.ref_cnt,
            "owner": self.sequences[view.owner].request_id if view.owner >= 0 else None,
            "slot": view.slot,
            "filled": view.filled,
            "hash": f"{view.hash:016x}" if view.hash else None,
        }

    # ------------------------------------------------------------------ as data

    def export_state(self) -> SnapshotState:
        """Return all of it as plain data, a copy that stays as it is."""
        return SnapshotState(
            step=self.step,
            t_ns=self.t_ns,
            totals=msgspec.structs.replace(self.totals),
            sequences=[msgspec.structs.replace(view, block_table=[]) for view in self.sequences.values()],
            running=list(self._running),
            tables={slot: list(blocks) for slot, blocks in self._tables.items() if blocks},
            holders={block_id: list(slots) for block_id, slots in self._holders.items()},
            filled=pack("H", self._filled),
            hashes=pack("Q", self._hashes),
            last_slots=pack("i", self._last_slot),
            last_record=self.last_record,
            last_batch=self.last_batch,
            policies=self.policies,
        )

    @classmethod
    def from_state(cls, config: EngineConfig, state: SnapshotState) -> Self:
        """Return the snapshot that was exported; `state` is the snapshot's from here on."""
        snapshot = cls(config)
        snapshot.step, snapshot.t_ns, snapshot.totals = state.step, state.t_ns, state.totals
        snapshot.last_record, snapshot.last_batch = state.last_record, state.last_batch
        snapshot.policies = state.policies or snapshot.policies
        snapshot._filled = unpack("H", state.filled)
        snapshot._hashes = unpack("Q", state.hashes)
        snapshot._last_slot = unpack("i", state.last_slots)
        snapshot._holders, snapshot._tables = state.holders, state.tables
        snapshot.sequences = {view.seq_id: view for view in state.sequences}
        for seq_id in state.running:
            view = snapshot.sequences[seq_id]
            view.block_table = snapshot._tables.setdefault(view.slot, [])
            snapshot._running[seq_id] = view
            snapshot._by_slot[view.slot] = seq_id
        snapshot.num_used = len(snapshot._holders)
        hashed = sum(1 for number in snapshot._hashes if number)
        held_and_hashed = sum(1 for block_id in snapshot._holders if snapshot._hashes[block_id])
        snapshot.num_cached = hashed - held_and_hashed
        snapshot.num_free = config.num_blocks - snapshot.num_used - snapshot.num_cached
        return snapshot

    # ------------------------------------------------------------------ folding

    def apply(self, record: StepRecord) -> set[int]:
        """Move to the state after `record`; return the blocks that may look different.

        Raises `EngineInvariantError` if a record is missing or its counts contradict the fold.
        """
        if record.step != self.step + 1:
            raise EngineInvariantError(f"record {record.step} does not follow {self.step}")
        self.step, self.t_ns, self.last_record = record.step, record.t_ns, record
        changed: set[int] = set()
        for op in record.block_ops:
            self._apply_block_op(op)
            changed.add(op.block_id)
        for event in record.events:
            self._apply_event(event)
            if isinstance(event, Reset):
                changed.update(range(self.config.num_blocks))
            elif isinstance(event, Loaded) and not event.is_orphan:
                changed.update(self._fill_loaded(event))
        if record.batch:
            self._apply_batch(record.batch, changed)
            self.last_batch = record
        counts = (self.num_free, self.num_cached, self.num_used)
        if counts != (record.num_free, record.num_cached, record.num_used):
            raise EngineInvariantError(
                f"step {record.step}: free/cached/used blocks are {counts} in the fold, "
                f"{(record.num_free, record.num_cached, record.num_used)} in the record"
            )
        return changed

    def _apply_block_op(self, op: BlockOp) -> None:
        block_id = op.block_id
        match op.kind:
            case BlockOpKind.ALLOCATE | BlockOpKind.LOOKAHEAD:
                self._hold(block_id, op.slot)
                self.num_free -= 1
                self.num_used += 1
                self.totals.num_lookahead += op.kind == BlockOpKind.LOOKAHEAD
            case BlockOpKind.HIT:
                if self._hold(block_id, op.slot):
                    self.num_cached -= 1
                    self.num_used += 1
            case BlockOpKind.STORE:
                self._hashes[block_id] = op.arg
                self._filled[block_id] = self.config.block_size
            case BlockOpKind.FREE:
                self._release(block_id, op.slot)
                self.totals.num_lookahead_unused += op.arg == FreeCause.UNUSED_LOOKAHEAD
            case BlockOpKind.EVICT:
                self._hashes[block_id] = 0
                self._filled[block_id] = 0
                self.num_cached -= 1
                self.num_free += 1
                self.totals.num_evictions += 1
            case BlockOpKind.SWAP_OUT:
                self.totals.num_swapped_out += 1
            case BlockOpKind.SWAP_IN:
                self.totals.num_swapped_in += 1
            case _:
                raise EngineInvariantError(f"unknown block operation {op.kind}")

    def _hold(self, block_id: int, slot: int) -> bool:
        """Append the block to the slot's table; return whether it was unreferenced."""
        holders = self._holders.setdefault(block_id, [])
        holders.append(slot)
        self._tables.setdefault(slot, []).append(block_id)
        return len(holders) == 1

    def _release(self, block_id: int, slot: int) -> None:
        holders = self._holders[block_id]
        holders.remove(slot)
        table = self._tables[slot]
        if table[-1] == block_id:  # the usual case: tables are given back tail first
            table.pop()
        else:
            table.remove(block_id)
        self._last_slot[block_id] = slot
        if not holders:
            del self._holders[block_id]
            self.num_used -= 1
            if self._hashes[block_id]:
                self.num_cached += 1
            else:
                self.num_free += 1
                self._filled[block_id] = 0

    def _apply_batch(self, batch: Sequence[BatchEntry], changed: set[int]) -> None:
        """Take in what was computed: one loop, since this is most of what a step costs whoever follows it."""
        sequences, filled, block_size = self.sequences, self._filled, self.config.block_size
        num_output_tokens = num_prefill_tokens = 0
        for entry in batch:
            start = entry.num_computed_before
            end = start + entry.num_scheduled
            has_token = entry.token_id >= 0
            num_output_tokens += has_token
            if not entry.is_decode:
                num_prefill_tokens += entry.num_scheduled
            view = sequences.get(entry.seq_id)
            if view is None:  # it ended in this step and its blocks are gone
                continue
            view.num_computed_tokens = end
            view.num_tokens += has_token
            first, last = start // block_size, (end - 1) // block_size
            for index in range(first, last):
                block_id = view.block_table[index]
                filled[block_id] = block_size
                changed.add(block_id)
            if end > start:
                block_id = view.block_table[last]
                filled[block_id] = end - last * block_size
                changed.add(block_id)
        self.totals.num_output_tokens += num_output_tokens
        self.totals.num_prefill_tokens += num_prefill_tokens

    def _fill_loaded(self, event: Loaded) -> list[int]:
        """Fill the blocks whose content has come from the host tier; return them."""
        view = self.sequences[event.seq_id]
        view.num_computed_tokens, view.is_loading = event.num_tokens, False
        end = event.num_tokens // self.config.block_size
        blocks = view.block_table[end - event.num_blocks : end]
        for block_id in blocks:
            self._filled[block_id] = self.config.block_size
        return blocks

    def _apply_event(self, event: Event) -> None:
        totals = self.totals
        match event:
            case Arrived():
                totals.num_arrived += 1
                self.sequences[event.seq_id] = SequenceView(
                    seq_id=event.seq_id,
                    request_id=event.request_id,
                    choice_index=event.choice_index,
                    num_prompt_tokens=event.num_prompt_tokens,
                    max_tokens=event.max_tokens,
                    arrived_ns=event.t_ns,
                    num_tokens=event.num_prompt_tokens,
                    priority=event.priority,
                    due_ns=event.due_ns,
                )
            case Admitted():
                self._admit(event)
            case Preempted():
                totals.num_preemptions += 1
                totals.num_tokens_lost += event.num_tokens_lost
                totals.num_swaps += event.num_tokens_kept > 0
                view = self._leave_slot(event.seq_id)
                view.num_preemptions += 1
                view.num_computed_tokens = 0
                view.num_tokens_before = event.num_tokens_lost + event.num_tokens_kept
            case Finished():
                self._leave_slot(event.seq_id)
                del self.sequences[event.seq_id]
                totals.num_aborted += event.reason == FinishReason.ABORT
                totals.num_failed += event.reason == FinishReason.ERROR
                totals.num_finished += event.reason in (FinishReason.STOP, FinishReason.LENGTH)
            case Loaded():
                totals.num_loads += 1
                totals.num_loads_hidden += not event.waited
            case Policies():
                self.policies = event
            case Stalled():
                totals.num_stalls += 1
            case Rejected():
                totals.num_rejected += 1
            case Reset():
                totals.num_resets += 1
                self._clear()

    def _admit(self, event: Admitted) -> None:
        view = self.sequences[event.seq_id]
        view.slot = event.slot
        view.reason = None
        view.block_table = self._tables.setdefault(event.slot, [])
        view.num_computed_tokens = event.num_cached_tokens
        view.is_loading = event.num_host_tokens > 0
        view.miss = event.miss
        num_found = event.num_cached_tokens + event.num_host_tokens
        self.totals.num_host_tokens += event.num_host_tokens
        if event.resumed:
            self.totals.num_recomputed_tokens += max(0, view.num_tokens_before - num_found)
        else:
            view.num_cached_tokens = num_found
            self.totals.num_lookup_tokens += event.num_tokens
            self.totals.num_hit_tokens += num_found
        self._running[event.seq_id] = view
        self._by_slot[event.slot] = event.seq_id

    def _leave_slot(self, seq_id: int) -> SequenceView:
        view = self.sequences[seq_id]
        if view.slot >= 0:
            del self._running[seq_id]
            if self._by_slot.get(view.slot) == seq_id:
                del self._by_slot[view.slot]
            view.slot = -1
            view.block_table = []
            view.is_loading = False
        return view
