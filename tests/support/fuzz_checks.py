"""What must hold of an engine after every record, whatever was asked of it: a second set of books."""

from collections import Counter
from dataclasses import dataclass, field

from engine.core import EngineCore
from engine.records import (
    Admitted,
    Arrived,
    BatchEntry,
    BlockOpKind,
    Event,
    Finished,
    FreeCause,
    Loaded,
    Preempted,
    RecordKind,
    Reset,
    Stalled,
    StepRecord,
    StepResult,
    StopReason,
)
from engine.runner.fake import FakeRunner
from engine.scheduling.queue import PriorityOrder
from engine.snapshot import EngineSnapshot
from tests.builders import folded_state, state_from_books


@dataclass
class Account:
    """One sequence as the records tell it."""

    arrived: Arrived
    is_running: bool = False
    num_found: int = 0  # by its newest admission, in pool and host tier
    num_kept: int = 0  # tokens whose KV it has
    num_on_the_way: int = 0  # tokens that a load brings
    most_kept: int = 0  # before its newest preemption
    num_outputs: int = 0
    num_recomputed: int = 0
    num_preemptions: int = 0
    outputs_when_preempted: list[int] = field(default_factory=list)
    end: str | None = None


class Auditor:
    """Takes every result of a core and asserts; `tally` counts what has happened."""

    def __init__(self, core: EngineCore, runner: FakeRunner) -> None:
        self.core, self.runner = core, runner
        self.snapshot = EngineSnapshot(core.config)
        self.accounts: dict[int, Account] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], list[str]] = {}
        self.tally: Counter[str] = Counter()
        self.num_steps = 0
        self._histories: dict[bytes, bytes] = {}  # hash of a block -> what its last token's KV must be

    # ------------------------------------------------------------------ after every record

    def take(self, result: StepResult) -> None:
        record = result.record
        owners = {view.slot: view.seq_id for view in self.snapshot.running}
        self.snapshot.apply(record)
        self.core.check_integrity()
        assert folded_state(self.snapshot) == state_from_books(self.core)
        assert record.num_free + record.num_cached + record.num_used == self.core.config.num_blocks
        self._check_contents()
        for event in record.events:
            self._book_event(event, record)
        for entry in record.batch:
            self._book_entry(entry)
        for output in result.outputs:
            key = output.request_id, output.choice_index
            assert key not in self.reasons, "told after its end"
            if output.token_id >= 0:
                self.tokens.setdefault(key, []).append(output.token_id)
            if output.finish_reason is not None:
                self.reasons.setdefault(key, []).append(output.finish_reason)
        self._count_block_ops(record, owners)
        if record.kind == RecordKind.STEP:
            self._check_step(record)

    def _check_contents(self) -> None:
        """Whatever can be found by a hash holds what that hash stands for, and always the same."""
        kv, last = self.core.scheduler.state.kv, self.core.config.block_size - 1
        holders = Counter(block_id for view in self.snapshot.running for block_id in view.block_table)
        assert all(kv.pool.blocks[block_id].block_hash for block_id, count in holders.items() if count > 1)
        for block in kv.pool.blocks:
            if block.block_hash is not None:
                value = self.runner._kv[block.block_id, last]
                assert self._histories.setdefault(block.block_hash, value) == value
        for host_id, (block_hash, _, _) in kv.host._contents.items():
            value = self.runner._host[host_id][last]
            assert self._histories.setdefault(block_hash, value) == value

    # ------------------------------------------------------------------ one record

    def _book_event(self, event: Event, record: StepRecord) -> None:
        match event:
            case Arrived():
                self.accounts[event.seq_id] = Account(event)
            case Admitted():
                self._book_admission(event)
            case Loaded():
                self._book_load(event, record)
            case Preempted():
                self._book_preemption(event)
            case Finished():
                account = self.accounts[event.seq_id]
                assert account.end is None, "ended twice"
                self.tally[f"{event.reason} of {self._describe(account)}"] += 1
                account.end, account.is_running = event.reason, False
            case Reset():
                self.tally["resets"] += 1
                assert all(account.end for account in self.accounts.values())
            case Stalled():
                raise AssertionError(f"stalled in step {record.step}: {event}")
            case _:
                self.tally[type(event).__name__] += 1

    @staticmethod
    def _describe(account: Account) -> str:
        if account.is_running:
            return "loading" if account.num_on_the_way else "running"
        return "preempted" if account.num_preemptions else "waiting"

    def _book_admission(self, event: Admitted) -> None:
        account = self.accounts[event.seq_id]
        assert not account.is_running
        assert event.resumed == (account.num_preemptions > 0)
        account.is_running = True
        account.num_kept, account.num_on_the_way = event.num_cached_tokens, event.num_host_tokens
        account.num_found = event.num_cached_tokens + event.num_host_tokens
        assert account.num_found < event.num_tokens == account.arrived.num_prompt_tokens + account.num_outputs
        self.tally["prefix hits"] += event.num_cached_tokens > 0
        if event.num_host_tokens:
            self.tally["resumed from the host tier" if event.resumed else "host hits"] += 1
        if event.miss is not None:
            self.tally[f"miss: {event.miss.kind}"] += 1
            assert account.num_found <= event.miss.position < event.num_tokens

    def _book_load(self, event: Loaded, record: StepRecord) -> None:
        if event.is_orphan:
            self.tally["orphan loads"] += 1
            assert self.accounts[event.seq_id].end is not None
            return
        account = self.accounts[event.seq_id]
        account.num_kept += account.num_on_the_way
        account.num_on_the_way = 0
        assert account.num_kept == event.num_tokens
        is_overdue = bool(event.waited and record.batch)
        self.tally["overdue loads"] += is_overdue
        self.tally["waited loads" if event.waited else "hidden loads"] += 1

    def _book_preemption(self, event: Preempted) -> None:
        account, config = self.accounts[event.seq_id], self.core.config
        assert account.is_running
        assert not account.num_on_the_way, "its blocks are being written"
        assert event.num_tokens_lost + event.num_tokens_kept == account.num_kept
        account.most_kept, account.num_kept, account.is_running = account.num_kept, 0, False
        if account.num_preemptions:
            assert account.num_outputs - account.outputs_when_preempted[-1] >= config.preemption_quantum
        account.num_preemptions += 1
        account.outputs_when_preempted.append(account.num_outputs)
        assert account.num_preemptions <= 1 + account.num_outputs // config.preemption_quantum
        self.tally["swaps" if event.mode == "swap" else "recomputes"] += 1
        self._check_choice(event)

    def _check_choice(self, event: Preempted) -> None:
        """The lowest score gives way, of equal ones the newest arrival; urgency is respected."""
        by_urgency = self.core.policies.policy == PriorityOrder.name
        _, _, newness = min(
            (-self.accounts[seq_id].arrived.priority if by_urgency else 0, score, -seq_id)
            for seq_id, score in event.candidates
        )
        assert event.seq_id == -newness
        if not by_urgency:
            return
        victim, beneficiary = self.accounts[event.seq_id], self.accounts[event.beneficiary]
        assert victim.arrived.priority >= beneficiary.arrived.priority
        is_own_need = beneficiary.is_running or victim is beneficiary
        assert event.need in ({"block"} if is_own_need else {"slot", "room"})
        if victim.arrived.priority > beneficiary.arrived.priority:
            assert victim.arrived.due_ns > beneficiary.arrived.due_ns, "it had aged"
            self.tally["displaced" if beneficiary.is_running else "interrupted"] += 1

    def _book_entry(self, entry: BatchEntry) -> None:
        account = self.accounts[entry.seq_id]
        assert not account.num_on_the_way, "it computes with what has not come yet"
        assert entry.num_computed_before == account.num_kept
        assert entry.num_scheduled > 0
        end = account.num_kept + entry.num_scheduled
        account.num_recomputed += max(0, min(end, account.most_kept) - account.num_kept)
        account.num_kept = end
        assert end <= account.arrived.num_prompt_tokens + account.num_outputs
        account.num_outputs += entry.token_id >= 0

    def _count_block_ops(self, record: StepRecord, owners: dict[int, int]) -> None:
        stayed = {view.slot for view in self.snapshot.running if owners.get(view.slot) == view.seq_id}
        for index, op in enumerate(record.block_ops):
            self.tally["evictions"] += op.kind == BlockOpKind.EVICT
            self.tally["lookahead"] += op.kind == BlockOpKind.LOOKAHEAD
            if op.kind == BlockOpKind.SWAP_OUT:
                following = record.block_ops[index + 1]
                is_offload = (following.kind, following.block_id) == (BlockOpKind.EVICT, op.block_id)
                self.tally["offloads" if is_offload else "swapped out"] += 1
            if op.kind == BlockOpKind.FREE and op.arg == FreeCause.UNUSED_LOOKAHEAD:
                self.tally["lookahead taken back" if op.slot in stayed else "lookahead unused"] += 1

    def _check_step(self, record: StepRecord) -> None:
        self.num_steps += 1
        assert record.batch or any(isinstance(event, Loaded) for event in record.events), "no progress"
        assert sum(entry.num_scheduled for entry in record.batch) <= record.token_budget
        computed = [entry.seq_id for entry in record.batch]
        assert len(set(computed)) == len(computed), "computed twice in a step"
        victims = {event.seq_id for event in record.events if isinstance(event, Preempted)}
        assert not victims.intersection(computed), "a victim stayed in the step"
        loaded = {event.seq_id for event in record.events if isinstance(event, Loaded)}
        for seq_id, account in self.accounts.items():
            if account.is_running and not account.num_on_the_way and seq_id not in loaded:
                assert seq_id in computed, "one that runs was skipped"
        self.tally["prefix pending"] += bool(record.prefix_pending)
        self.tally[StopReason(record.stop_reason).name] += 1
        self.tally["all at once"] += len(victims) > 1
        self._check_queue(record)
        self._check_first_tokens(record)

    def _check_queue(self, record: StepRecord) -> None:
        """Nobody was admitted past another one, but for those that wait for a prefix being computed."""
        admitted = [self.accounts[event.seq_id] for event in record.events if isinstance(event, Admitted)]
        if not admitted:
            return
        last = max(self._place(account) for account in admitted)
        for seq_id, account in self.accounts.items():
            if not account.is_running and account.end is None and seq_id not in record.prefix_pending:
                assert self._place(account) > last, f"{seq_id} was passed over"

    def _check_first_tokens(self, record: StepRecord) -> None:
        """First come, first served, no prompt is begun in a step in which only others end."""
        if self.core.policies.policy == PriorityOrder.name:
            return
        resumed = {event.seq_id: event.resumed for event in record.events if isinstance(event, Admitted)}
        failed = {event.seq_id for event in record.events if isinstance(event, Finished)} - {
            entry.seq_id for entry in record.batch if entry.token_id >= 0
        }
        prompts = [
            entry
            for entry in record.batch
            if entry.seq_id not in failed and not (entry.is_decode and resumed.get(entry.seq_id, True))
        ]
        if any(entry.token_id >= 0 for entry in prompts):
            assert all(entry.token_id >= 0 for entry in prompts if entry.seq_id in resumed), "held up"

    def _place(self, account: Account) -> tuple[int, int]:
        is_by_priority = self.core.policies.policy == PriorityOrder.name
        return account.arrived.due_ns if is_by_priority else 0, account.arrived.seq_id

    # ------------------------------------------------------------------ at the end

    @property
    def max_steps(self) -> int:
        """The bound on the steps of a run, failures apart.

        Every step computes a token or ends a load. A sequence is admitted once more than it is preempted, and
        each preemption but the first costs `preemption_quantum` tokens; between two of them it computes
        each of its tokens once, at most, and has one load.
        """
        quantum = self.core.config.preemption_quantum
        return sum(
            (2 + account.num_outputs // quantum)
            * (account.arrived.num_prompt_tokens + account.num_outputs + 1)
            for account in self.accounts.values()
        )

    def check_end(self) -> None:
        """Nothing is left, and the totals are those of the accounts."""
        state, totals = self.core.scheduler.state, self.snapshot.totals
        assert not state.running
        assert not len(state.waiting)
        assert not state.by_request
        assert not state.kv.loads
        assert state.kv.pool.num_used == 0
        assert state.kv.host.num_pinned == 0
        assert self.num_steps <= self.max_steps
        accounts = self.accounts.values()
        assert all(account.end for account in accounts)
        assert totals.num_stalls == 0
        assert totals.num_output_tokens == sum(account.num_outputs for account in accounts)
        assert totals.num_output_tokens == sum(map(len, self.tokens.values()))
        assert totals.num_preemptions == sum(account.num_preemptions for account in accounts)
        recomputed = sum(account.num_recomputed for account in accounts)
        if all(account.end in ("stop", "length") for account in accounts):
            assert totals.num_recomputed_tokens == recomputed
        assert totals.num_recomputed_tokens >= recomputed
