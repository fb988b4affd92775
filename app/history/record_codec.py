"""Step records and states of the engine as bytes, as they lie in the history; exact both ways.

Two forms of records. What is written every moment is plain MessagePack: quick to make. A complete run of 256
steps is columnar: each field of all steps lies together as the difference to what the step before lets one
expect (a decoding sequence computes its next token in its old slot), so that most numbers are zero, and the
whole is compressed.
"""

import zlib
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TypeVar

import msgspec

from app.errors import HistoryUnavailableError
from app.history.columns import pack_numbers, unpack_numbers
from engine.records import (
    BatchEntry,
    BlockOp,
    BlockOpKind,
    Event,
    Finished,
    Preempted,
    StepRecord,
)
from engine.snapshot_data import SnapshotState

_PLAIN = b"P"
_COLUMNS = b"C"
_STATE = b"S"
_COMPRESSION_LEVEL = 6
_MAX_INFLATED_BYTES = 2**30

T = TypeVar("T")


def encode_plain(records: Sequence[StepRecord]) -> bytes:
    """Encode records quickly; about 800 bytes for a step of 64 sequences."""
    return _PLAIN + msgspec.msgpack.encode(records)


def encode_columns(records: Sequence[StepRecord]) -> bytes:
    """Encode consecutive records compactly; takes 0.1 ms a step of 64 sequences."""
    return _COLUMNS + _deflate(_encode_columns(records))


def decode_records(data: bytes) -> list[StepRecord]:
    """Decode either form; raises `HistoryUnavailableError` if the bytes are damaged."""
    try:
        return _decode_records(data)
    except (ValueError, zlib.error, msgspec.MsgspecError) as error:
        raise HistoryUnavailableError(f"Recorded steps are damaged: {error}.") from error


def _decode_records(data: bytes) -> list[StepRecord]:
    if data[:1] == _PLAIN:
        return msgspec.msgpack.decode(memoryview(data)[1:], type=list[StepRecord])
    return list(_decode_columns(_inflate(data, _COLUMNS, _Columns)))


def encode_state(state: SnapshotState) -> bytes:
    """Encode the engine's state after a step."""
    return _STATE + _deflate(state)


def decode_state(data: bytes) -> SnapshotState:
    """Decode a state; raises `HistoryUnavailableError` if the bytes are damaged."""
    try:
        return _inflate(data, _STATE, SnapshotState)
    except (ValueError, zlib.error, msgspec.MsgspecError) as error:
        raise HistoryUnavailableError(f"A recorded state is damaged: {error}.") from error


def hide_tokens(record: StepRecord) -> StepRecord:
    """Return the record with each sampled token as 0, for sessions whose text is not kept."""
    if not any(entry.token_id > 0 for entry in record.batch):
        return record
    batch = [
        msgspec.structs.replace(entry, token_id=0) if entry.token_id > 0 else entry for entry in record.batch
    ]
    return msgspec.structs.replace(record, batch=batch)


# ---------------------------------------------------------------- columns


class _Columns(msgspec.Struct, array_like=True):
    """Columns of one run. `per_step` has a column for each name of `_STEP_FIELDS` and three of lengths."""

    first_step: int
    first_ns: int
    per_step: list[bytes]
    events: list[list[Event]]
    pending: bytes
    batch: list[bytes]
    ops: list[bytes]
    hashes: bytes


_PLAIN_FIELDS = ("kind", "stop_reason", "schedule_ns", "forward_ns", "sample_ns", "host_ns")
_RUNNING_FIELDS = ("token_budget", "num_running", "num_waiting", "num_free", "num_cached", "num_used")
"""These are stored as the difference to the step before."""

_HOST_FIELDS = ("num_host_used", "num_host_pinned")
"""The same; recordings from before there was a host tier lack these columns."""

_FIRST_STEP_FIELDS = ("gap_ns", *_PLAIN_FIELDS, *_RUNNING_FIELDS, "num_entries", "num_ops", "num_pending")
_STEP_FIELDS = (*_FIRST_STEP_FIELDS, *_HOST_FIELDS)
_CHANGING_FIELDS = (*_RUNNING_FIELDS, *_HOST_FIELDS)
_BATCH_FIELDS = 5
_OP_FIELDS = 4


class _Expectation:
    """What the steps so far let one expect of the next one; the same on both sides.

    Of a sequence: its slot and how many tokens are computed, 0 for a new one. Of a place in the batch: whose
    it was, without those that have left since; behind them, the number after the one before.
    """

    def __init__(self, first_ns: int) -> None:
        self.t_ns = first_ns
        self.counts = [0] * len(_CHANGING_FIELDS)
        self.slots: dict[int, int] = {}
        self.computed: dict[int, int] = {}
        self.seq_ids: list[int] = []

    def move(self, record: StepRecord) -> None:
        """Learn from a whole record."""
        self.t_ns = record.t_ns + record.schedule_ns + record.forward_ns + record.sample_ns + record.host_ns
        self.counts = [getattr(record, name) for name in _CHANGING_FIELDS]
        slots, computed = self.slots, self.computed
        for entry in record.batch:
            seq_id = entry.seq_id
            slots[seq_id] = entry.slot
            computed[seq_id] = entry.num_computed_before + entry.num_scheduled
        gone = {event.seq_id for event in record.events if isinstance(event, Finished | Preempted)}
        self.seq_ids = [entry.seq_id for entry in record.batch if entry.seq_id not in gone]


def _encode_columns(records: Sequence[StepRecord]) -> _Columns:
    first = records[0]
    expected = _Expectation(first.t_ns)
    steps: list[list[int]] = [[] for _ in _STEP_FIELDS]
    batch: list[list[int]] = [[] for _ in range(_BATCH_FIELDS)]
    ops: list[list[int]] = [[] for _ in range(_OP_FIELDS)]
    hashes: list[int] = []
    for index, record in enumerate(records):
        if record.step != first.step + index:
            raise ValueError(f"step {record.step} is not step {first.step + index}")
        values = [record.t_ns - expected.t_ns]
        values += [int(getattr(record, name)) for name in _PLAIN_FIELDS]
        changes = [
            getattr(record, name) - before
            for name, before in zip(_CHANGING_FIELDS, expected.counts, strict=True)
        ]
        num_running = len(_RUNNING_FIELDS)
        values += changes[:num_running]
        values += [len(record.batch), len(record.block_ops), len(record.prefix_pending)]
        values += changes[num_running:]
        for column, value in zip(steps, values, strict=True):
            column.append(value)
        _add_batch(record.batch, expected, batch)
        _add_ops(record.block_ops, ops, hashes)
        expected.move(record)
    return _Columns(
        first_step=first.step,
        first_ns=first.t_ns,
        per_step=[pack_numbers(column) for column in steps],
        events=[record.events for record in records],
        pending=pack_numbers([seq_id for record in records for seq_id in record.prefix_pending]),
        batch=[pack_numbers(column) for column in batch],
        ops=[pack_numbers(column) for column in ops],
        hashes=pack_numbers(hashes),
    )


def _add_batch(batch: list[BatchEntry], expected: _Expectation, columns: list[list[int]]) -> None:
    seq_ids, slots, computed, scheduled, tokens = columns
    guesses, num_guesses = expected.seq_ids, len(expected.seq_ids)
    before = -1
    for position, entry in enumerate(batch):
        seq_id = entry.seq_id
        seq_ids.append(seq_id - (guesses[position] if position < num_guesses else before + 1))
        slots.append(entry.slot - expected.slots.get(seq_id, 0))
        computed.append(entry.num_computed_before - expected.computed.get(seq_id, 0))
        scheduled.append(entry.num_scheduled - 1)
        tokens.append(entry.token_id + 2)  # -1 and -2 have a meaning of their own
        before = seq_id


def _add_ops(block_ops: list[BlockOp], columns: list[list[int]], hashes: list[int]) -> None:
    kinds, block_ids, slots, arguments = columns
    before = 0
    for op in block_ops:
        kinds.append(int(op.kind))
        block_ids.append(op.block_id - before)
        slots.append(op.slot + 1)
        if op.kind == BlockOpKind.STORE:
            hashes.append(op.arg)
        else:
            arguments.append(int(op.arg))
        before = op.block_id


def _decode_columns(columns: _Columns) -> Iterator[StepRecord]:
    expected = _Expectation(columns.first_ns)
    per_step = [unpack_numbers(column) for column in columns.per_step]
    if len(per_step) == len(_FIRST_STEP_FIELDS):
        per_step += [[0] * len(columns.events) for _ in _HOST_FIELDS]
    if len(per_step) != len(_STEP_FIELDS):
        raise ValueError("columns are missing")
    rows = zip(*per_step, strict=True)
    batch = zip(*(unpack_numbers(column) for column in columns.batch), strict=True)
    kinds, block_ids, slots, arguments = (iter(unpack_numbers(column)) for column in columns.ops)
    ops = _Ops(zip(kinds, block_ids, slots, strict=True), arguments, iter(unpack_numbers(columns.hashes)))
    pending = iter(unpack_numbers(columns.pending))
    for index, (row, events) in enumerate(zip(rows, columns.events, strict=True)):
        gap_ns, kind, stop_reason, schedule_ns, forward_ns, sample_ns, host_ns = row[:7]
        changes = (*row[7:13], *row[16:])
        counts = [value + before for value, before in zip(changes, expected.counts, strict=True)]
        num_entries, num_ops, num_pending = row[13:16]
        record = StepRecord(
            step=columns.first_step + index,
            kind=kind,
            t_ns=expected.t_ns + gap_ns,
            schedule_ns=schedule_ns,
            forward_ns=forward_ns,
            sample_ns=sample_ns,
            host_ns=host_ns,
            batch=_take_batch(batch, num_entries, expected),
            block_ops=ops.take(num_ops),
            events=events,
            stop_reason=stop_reason,
            prefix_pending=_take(pending, num_pending),
            **dict(zip(_CHANGING_FIELDS, counts, strict=True)),
        )
        expected.move(record)
        yield record


def _take_batch(rows: Iterator[tuple[int, ...]], count: int, expected: _Expectation) -> list[BatchEntry]:
    slots, computed = expected.slots.get, expected.computed.get
    guesses, num_guesses = expected.seq_ids, len(expected.seq_ids)
    entries = []
    before = -1
    for position, (difference, slot, num_computed, scheduled, token) in enumerate(_take(rows, count)):
        before = difference + (guesses[position] if position < num_guesses else before + 1)
        entries.append(
            BatchEntry(
                before,
                slot + slots(before, 0),
                num_computed + computed(before, 0),
                scheduled + 1,
                token - 2,
            )
        )
    return entries


class _Ops:
    """Block operations as they come out of their columns."""

    def __init__(
        self, rows: Iterator[tuple[int, int, int]], arguments: Iterator[int], hashes: Iterator[int]
    ) -> None:
        self._rows = rows
        self._arguments = arguments
        self._hashes = hashes

    def take(self, count: int) -> list[BlockOp]:
        """Return those of the next step."""
        ops = []
        block_id = 0
        arguments, hashes, store = self._arguments, self._hashes, int(BlockOpKind.STORE)
        for kind, difference, slot in _take(self._rows, count):
            block_id += difference
            arg = next(hashes if kind == store else arguments, None)
            if arg is None:
                raise ValueError("a column ends early")
            ops.append(BlockOp(kind, block_id, slot - 1, arg))
        return ops


def _take(source: Iterator[T], count: int) -> list[T]:
    taken = list(islice(source, count))
    if len(taken) != count:
        raise ValueError("a column ends early")
    return taken


def _deflate(value: object) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(value), _COMPRESSION_LEVEL)


def _inflate(data: bytes, form: bytes, kind: type[T]) -> T:
    if data[:1] != form:
        raise ValueError("it has an unknown form")
    inflater = zlib.decompressobj()
    plain = inflater.decompress(memoryview(data)[1:], _MAX_INFLATED_BYTES)
    if not inflater.eof:
        raise ValueError("its end is missing")
    return msgspec.msgpack.decode(plain, type=kind)
