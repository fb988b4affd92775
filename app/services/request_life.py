"""One request's life: its phases from its events, its blocks and tokens from the step records."""

from collections.abc import Sequence

import msgspec

from app.realtime.decisions import SequenceName, order_candidates
from app.services.request_rows import RequestEvent
from engine.records import Arrived, BatchEntry, BlockOpKind, Policies, Preempted, StepRecord, StopReason
from engine.snapshot import PRIORITY_POLICY, EngineSnapshot
from engine.views import SequenceView

_NEXT_PHASE = {
    "arrived": "queued",
    "admitted": "prefill",
    "first_token": "decode",
    "preempted": "preempted",
    "resumed": "recompute",
    "recomputed": "decode",
}
"""What begins with an event. A preempted request computes again what it had: prompt and answer so far."""


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the life of one choice; `end_ns` and `last_step` are None while it goes on.

    `kind`: queued, prefill, decode, preempted, recompute.
    """

    kind: str
    first_step: int
    last_step: int | None
    start_ns: int
    end_ns: int | None


class BlockChange(msgspec.Struct, frozen=True, kw_only=True):
    """How a block table changed in a step: blocks found in the prefix cache, newly allocated, given back."""

    step: int
    t_ns: int
    num_blocks: int
    hit: list[int]
    allocated: list[int]
    removed: list[int]


class PromptChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens [first_token, first_token + num_tokens) computed in one step that is not shown as decode."""

    step: int
    first_token: int
    num_tokens: int


class Wait(msgspec.Struct, kw_only=True):
    """Steps `first_step` to `last_step`, in which the sequence had no slot for one reason.

    `reason`: the name of a `StopReason` in small letters.
    """

    reason: str
    first_step: int
    last_step: int


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence that could have been preempted, with the score that the preemption policy gave it."""

    request_id: str
    choice_index: int
    score: float
    priority: int


class TokenRow(msgspec.Struct, frozen=True, kw_only=True):
    """One generated token. `index` counts from 0, `t_ns` is the end of its step.

    `ms` is the time since the token before, for the first one since the arrival, None where that is not
    known. `batch_size`: sequences in the step, `num_batch_tokens`: tokens computed in it.
    """

    index: int
    step: int
    token_id: int
    t_ns: int
    ms: float | None
    batch_size: int
    num_batch_tokens: int


class ChoiceLife(msgspec.Struct, kw_only=True):
    """What the step records say of one choice, as far as they were read."""

    choice_index: int
    seq_id: int
    chunks: list[PromptChunk] = []
    blocks: list[BlockChange] = []
    tokens: list[TokenRow] = []
    waits: list[Wait] = []
    candidates: dict[int, list[Candidate]] = {}
    """By the step in which the choice was preempted, those that it was chosen from.

    They are in the order in which they would have gone.
    """


def make_phases(
    events: Sequence[RequestEvent], end_step: int | None = None, end_ns: int | None = None
) -> list[Phase]:
    """Return the phases of one choice from its events in order.

    `end_step`, `end_ns`: when its request ended, if it did; the server may have ended without a word of it.
    """
    phases: list[Phase] = []
    kind, start = "", None
    for event in events:
        if start is not None and kind:
            phases.append(
                Phase(
                    kind=kind,
                    first_step=start.step,
                    last_step=event.step,
                    start_ns=start.t_ns,
                    end_ns=event.t_ns,
                )
            )
        kind, start = _NEXT_PHASE.get(event.kind, ""), event
    if start is not None and kind:
        phases.append(
            Phase(kind=kind, first_step=start.step, last_step=end_step, start_ns=start.t_ns, end_ns=end_ns)
        )
    return phases


class LifeReader:
    """Follows some sequences through step records; `snapshot` is used up."""

    def __init__(self, snapshot: EngineSnapshot, lives: Sequence[ChoiceLife], arrived_ns: int) -> None:
        """Begin with the state before the first record; a first token counts from `arrived_ns`."""
        self._snapshot = snapshot
        self._lives = lives
        self._arrived_ns = arrived_ns
        self._tables = [self._table_of(life) for life in lives]
        self._num_tokens = [self._count_tokens(life) for life in lives]
        self._last_ns = [None if count else arrived_ns for count in self._num_tokens]

    @property
    def step(self) -> int:
        """The last record that was taken."""
        return self._snapshot.step

    def resume(self, snapshot: EngineSnapshot) -> None:
        """Go on after a gap."""
        self._snapshot = snapshot
        self._tables = [self._table_of(life) for life in self._lives]
        self._num_tokens = [self._count_tokens(life) for life in self._lives]
        self._last_ns = [None if count else self._arrived_ns for count in self._num_tokens]

    def take(self, records: Sequence[StepRecord]) -> int:
        """Take records as far as they follow each other; return how many."""
        for number, record in enumerate(records):
            if record.step != self._snapshot.step + 1:
                return number
            self._take(record)
        return len(records)

    def _take(self, record: StepRecord) -> None:
        if any(isinstance(event, Preempted) for event in record.events):
            self._take_preemptions(record)
        self._snapshot.apply(record)
        end_ns = record.t_ns + record.schedule_ns + record.forward_ns + record.sample_ns + record.host_ns
        entries = {entry.seq_id: entry for entry in record.batch}
        num_batch_tokens = sum(entry.num_scheduled for entry in record.batch)
        for number, life in enumerate(self._lives):
            entry = entries.get(life.seq_id)
            if entry is not None:
                self._take_entry(number, entry, record, end_ns, num_batch_tokens)
            else:
                self._take_wait(life, record)
            self._take_table(number, record)

    def _take_preemptions(self, record: StepRecord) -> None:
        """Keep who could have been the victim; the names are those before the step, which may end some."""
        known = self._snapshot.sequences
        names = {
            event.seq_id: SequenceName(event.request_id, event.choice_index, event.priority)
            for event in [*known.values(), *record.events]
            if isinstance(event, SequenceView | Arrived)
        }
        priorities = {seq_id: name.priority for seq_id, name in names.items()}
        changes = [event.policy for event in record.events if isinstance(event, Policies)]
        policy = changes[-1] if changes else self._snapshot.policies.policy
        lives = {life.seq_id: life for life in self._lives}
        for event in record.events:
            if isinstance(event, Preempted) and event.seq_id in lives:
                lives[event.seq_id].candidates[record.step] = [
                    Candidate(**msgspec.structs.asdict(names[seq_id]), score=score)
                    for seq_id, score in order_candidates(event, policy, priorities)
                ]

    def _take_wait(self, life: ChoiceLife, record: StepRecord) -> None:
        view = self._snapshot.sequences.get(life.seq_id)
        if view is None or view.slot >= 0:
            return
        name = self._find_reason(view, record)
        wait = life.waits[-1] if life.waits else None
        if wait is None or wait.reason != name or wait.last_step != record.step - 1:
            life.waits.append(Wait(reason=name, first_step=record.step, last_step=record.step))
        else:
            wait.last_step = record.step

    def _find_reason(self, view: SequenceView, record: StepRecord) -> str:
        if self._snapshot.policies.policy == PRIORITY_POLICY:
            reasons = {other.seq_id: other.reason for other in self._snapshot.waiting}
            return reasons[view.seq_id] or ""
        is_pending = view.seq_id in record.prefix_pending
        reason = StopReason.PREFIX_PENDING if is_pending else StopReason(record.stop_reason)
        return reason.name.lower()

    def _take_entry(
        self, number: int, entry: BatchEntry, record: StepRecord, end_ns: int, num_batch_tokens: int
    ) -> None:
        life = self._lives[number]
        if not entry.is_decode or self._num_tokens[number] == 0:  # a prompt may end with a chunk of one token
            life.chunks.append(
                PromptChunk(
                    step=record.step, first_token=entry.num_computed_before, num_tokens=entry.num_scheduled
                )
            )
        if entry.token_id < 0:
            return
        before_ns = self._last_ns[number]
        life.tokens.append(
            TokenRow(
                index=self._num_tokens[number],
                step=record.step,
                token_id=entry.token_id,
                t_ns=end_ns,
                ms=(end_ns - before_ns) / 1e6 if before_ns is not None else None,
                batch_size=len(record.batch),
                num_batch_tokens=num_batch_tokens,
            )
        )
        self._num_tokens[number] += 1
        self._last_ns[number] = end_ns

    def _take_table(self, number: int, record: StepRecord) -> None:
        life, before = self._lives[number], self._tables[number]
        after = self._table_of(life)
        if after == before:
            return
        held, kept = set(before), set(after)
        added = [block_id for block_id in after if block_id not in held]
        view = self._snapshot.sequences.get(life.seq_id)
        slot = view.slot if view is not None else -1
        hits = {op.block_id for op in record.block_ops if op.kind == BlockOpKind.HIT and op.slot == slot}
        life.blocks.append(
            BlockChange(
                step=record.step,
                t_ns=record.t_ns,
                num_blocks=len(after),
                hit=[block_id for block_id in added if block_id in hits],
                allocated=[block_id for block_id in added if block_id not in hits],
                removed=[block_id for block_id in before if block_id not in kept],
            )
        )
        self._tables[number] = after

    def _table_of(self, life: ChoiceLife) -> list[int]:
        view = self._snapshot.sequences.get(life.seq_id)
        return list(view.block_table) if view is not None else []

    def _count_tokens(self, life: ChoiceLife) -> int:
        view = self._snapshot.sequences.get(life.seq_id)
        return view.num_output_tokens if view is not None else 0
