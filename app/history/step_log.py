"""Keeps every step record: small rows at once, one compact row and a state for each 256 steps.

What is lost (no room in the writer's queue, refused rows) leaves a gap with a definite end: a state without
which the steps after it could not be read (`KeyframeRow.is_base`). So whatever record is there can be folded,
from the session's start or from a base, even when all other states are deleted.
"""

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from sqlalchemy import bindparam, delete, insert, update

from app.db.models import ChunkRow, KeyframeRow, SessionRow
from app.db.writer import HistoryWriter
from app.db.writes import Turn, Write
from app.history.record_codec import encode_columns, encode_plain, encode_state, hide_tokens
from app.history.recorder import TextSwitch
from engine.config import EngineConfig
from engine.records import StepRecord
from engine.snapshot import EngineSnapshot
from engine.snapshot_data import SnapshotState

logger = logging.getLogger(__name__)

CHUNK_STEPS = 256
"""Steps of a compact row, the last of which is a multiple of it."""

DELAY_S = 0.3
"""How long a record may wait for company, unless somebody reads."""

RETRY_S = 1.0
"""And how long while there is no room for records: each attempt brings the whole state with it."""


# Built once: building and hashing a statement takes longer than running it.
_INSERT_CHUNK = insert(ChunkRow)
_INSERT_STATE = insert(KeyframeRow)
_DELETE_CHUNKS = delete(ChunkRow).where(
    ChunkRow.session_id == bindparam("session"),
    ChunkRow.first_step.between(bindparam("first"), bindparam("last")),
)
_UPDATE_SESSION = (
    update(SessionRow)
    .where(SessionRow.id == bindparam("session"))
    .values(last_step=bindparam("last"), num_lost_steps=bindparam("num_lost"))
)


@dataclass(frozen=True)
class _Loss:
    """Steps from `first_step` on are lost, `num_before` of this session before them."""

    first_step: int
    num_before: int


class StepLog:
    """A part of the recorder. Lives on the event loop, which it never holds for long."""

    def __init__(
        self, session_id: str, writer: HistoryWriter, text: TextSwitch, *, delay_s: float = DELAY_S
    ) -> None:
        """Nothing is written before the first record; without `text` token ids are not kept."""
        self._session_id = session_id
        self._writer = writer
        self._text = text
        self._delay_s = delay_s
        self._snapshot: EngineSnapshot | None = None
        self._last_record: StepRecord | None = None  # as it was kept
        self._last_batch: StepRecord | None = None
        self._pending: list[StepRecord] = []
        self._run: list[StepRecord] = []  # of the current 256 steps, as far as they are written as small rows
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # what is encoded off the event loop
        self._encoding: SnapshotState | None = None  # the base that is
        self._is_closed = False
        self._loss: _Loss | None = None
        self._base: SnapshotState | None = None
        self._num_losses = 0
        self._num_lost_steps = 0
        writer.add_holder(self._give_back)

    def on_open(self, config: EngineConfig) -> None:
        """Nothing to prepare: the recorder writes the session and its configuration."""

    def on_record(self, record: StepRecord, snapshot: EngineSnapshot) -> None:
        """Take one record; `snapshot` is the state after it."""
        self._snapshot = snapshot
        kept = record if self._text.is_on else hide_tokens(record)
        self._last_record = kept
        if kept.batch:
            self._last_batch = kept
        self._pending.append(kept)
        if record.step % CHUNK_STEPS == 0:
            self.flush()
            self._begin_compaction(snapshot)
        else:
            self._flush_later()

    def on_close(self) -> None:
        """Write what waits; what is left of the last run becomes one row."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()  # its records are there as small rows, a base is still to come
        self.flush()
        if len(self._run) > 1 and self._loss is None:
            self._put_run(self._run, encode_columns(self._run))
        self._run = []

    def flush(self) -> None:
        """Queue what waits as one small row."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._base is not None and self._writer.status.state != "off":
            self._end_gap(self._base)
        elif self._pending:
            loss = _Loss(self._pending[0].step, self._num_lost_steps)
            self._put([], loss)

    def _give_back(self) -> None:
        """Queue what waits for company; not what waits for room."""
        if self._loss is None:
            self.flush()

    def _flush_later(self) -> None:
        if self._timer is None and not self._is_closed:
            delay_s = self._delay_s if self._loss is None else RETRY_S
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.flush)

    # ---------------------------------------------------------------- small rows

    def _put(self, writes: list[Write], loss: _Loss) -> None:
        """Queue `writes` and rows of what waits; `loss` is what it is if they do not get there."""
        on_lost = partial(self._on_lost, loss)
        last_step = self._base.step if self._base is not None else 0
        for records in self._take_pending():
            last_step = records[-1].step
            data = encode_plain(records)
            row = self._make_row(records, data)
            size, count = len(data), len(records)
            writes.append(
                Write(_INSERT_CHUNK, [row], size, num_steps=count, on_lost=on_lost, turn=Turn.STEPS)
            )
        values = {"session": self._session_id, "last": last_step, "num_lost": self._num_lost_steps}
        writes.append(Write(_UPDATE_SESSION, [values], on_lost=on_lost, turn=Turn.SESSION))
        self._writer.put(*writes)

    def _take_pending(self) -> list[list[StepRecord]]:
        """Return what waits as one row, or as several so that none reaches over the end of a run."""
        rows: list[list[StepRecord]] = []
        for record in self._pending:
            if not rows or rows[-1][-1].step % CHUNK_STEPS == 0:
                rows.append([])
                self._run = [] if record.step % CHUNK_STEPS == 1 else self._run
            rows[-1].append(record)
            self._run.append(record)
        self._pending = []
        return rows

    def _make_row(self, records: list[StepRecord], data: bytes) -> dict[str, object]:
        return {
            "session_id": self._session_id,
            "first_step": records[0].step,
            "num_steps": len(records),
            "first_ns": records[0].t_ns,
            "last_ns": records[-1].t_ns,
            "records": data,
        }

    # ---------------------------------------------------------------- losses

    def _on_lost(self, loss: _Loss) -> None:
        """Begin a gap at the first step that is lost, or go on with the gap that there is."""
        if self._loss is None or loss.first_step < self._loss.first_step:
            self._loss = loss
        self._num_losses += 1
        self._pending.clear()
        self._run.clear()
        if self._snapshot is None:
            return
        if self._base is None or self._base.step != self._snapshot.step:
            # The newest state: records from the next one on are readable with it.
            self._base = self._export(self._snapshot)
        self._flush_later()  # there may be no more records
        self._num_lost_steps = self._loss.num_before + self._base.step - self._loss.first_step + 1

    def _end_gap(self, base: SnapshotState) -> None:
        """Queue the end of a gap once its state is encoded, off the event loop unless there is no later."""
        if self._is_closed:
            self._put_after_loss(base, encode_state(base))
        elif self._encoding is None:
            self._encoding = base
            self._run_task(self._encode_base(base))

    async def _encode_base(self, base: SnapshotState) -> None:
        try:
            data = await asyncio.to_thread(encode_state, base)
        finally:
            self._encoding = None
        if self._base is base:
            self._put_after_loss(base, data)
        else:  # more was lost in the meantime
            self._flush_later()

    def _put_after_loss(self, base: SnapshotState, data: bytes) -> None:
        """Queue the end of a gap and what has come since; what lies in the gap can no longer be read."""
        loss = self._loss
        assert loss is not None, "a base is there because of a loss"  # noqa: S101
        keyframe = {"session_id": self._session_id, "step": base.step, "is_base": True, "state": data}
        writes = [
            Write(
                delete(ChunkRow).where(
                    ChunkRow.session_id == self._session_id, ChunkRow.first_step >= loss.first_step
                )
            ),
            Write(
                delete(KeyframeRow).where(
                    KeyframeRow.session_id == self._session_id, KeyframeRow.step >= loss.first_step
                )
            ),
            Write(_INSERT_STATE, [keyframe], num_bytes=len(data)),
        ]
        self._loss = None
        self._put(writes, loss)
        if self._loss is None:  # there was room for it
            self._base = None

    # ---------------------------------------------------------------- compact rows

    def _begin_compaction(self, snapshot: EngineSnapshot) -> None:
        records, self._run = self._run, []
        if self._base is not None or not records:
            return
        state = self._export(snapshot)
        self._run_task(self._compact(records, state, self._num_losses))

    def _run_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _compact(self, records: list[StepRecord], state: SnapshotState, num_losses: int) -> None:
        """Encode off the event loop, then let one row and a state take the place of the small rows."""
        try:
            data = await asyncio.to_thread(encode_columns, records)
            state_data = await asyncio.to_thread(encode_state, state)
        except Exception:  # the small rows stay: nothing is lost
            logger.exception("Steps %d to %d cannot be compacted", records[0].step, records[-1].step)
            return
        if self._num_losses != num_losses:  # some of them may not be there
            return
        keyframe = {"session_id": self._session_id, "step": state.step, "is_base": False, "state": state_data}
        self._put_run(records, data, Write(_INSERT_STATE, [keyframe], len(state_data), turn=Turn.STATE))

    def _put_run(self, records: list[StepRecord], data: bytes, *more: Write) -> None:
        old = {"session": self._session_id, "first": records[0].step, "last": records[-1].step}
        self._writer.put(
            Write(_DELETE_CHUNKS, [old], turn=Turn.OLD_STEPS),
            Write(_INSERT_CHUNK, [self._make_row(records, data)], len(data), turn=Turn.COMPACT_STEPS),
            *more,
        )

    def _export(self, snapshot: EngineSnapshot) -> SnapshotState:
        """Return the state with the records as they are kept: the snapshot's own may have token ids."""
        return msgspec.structs.replace(
            snapshot.export_state(), last_record=self._last_record, last_batch=self._last_batch
        )
