"""The engine's picture and its recent past, from which any client can be brought up to date.

No client has a queue. A client is a `Cursor` of a few numbers; what it misses is worked out when it can
take a message: the newest value of each cell that changed, every step row it has not had, and a gap
frame for rows that are no longer here. However slow a client is, it costs the same and is never wrong.
"""

from array import array
from collections import deque
from collections.abc import Iterable
from copy import copy
from typing import NamedTuple

import msgspec

from app.realtime.frames import (
    BLANK_CELL,
    CELL_BYTES,
    MARK_BYTES,
    ROW_BYTES,
    Frame,
    FrameKind,
    HostCounts,
    make_batch,
    make_delta,
    make_gap,
    make_host,
    make_keyframe,
    make_marks,
    make_steps,
    mark_step,
    pack_cell,
)
from app.realtime.rings import ByteRing
from app.realtime.step_rows import encode_marks, encode_row
from engine.config import EngineConfig
from engine.records import Reset, StepRecord
from engine.snapshot import EngineSnapshot

KEPT_ROWS = 16_384
KEPT_MARKS = 16_384
MIN_KEPT_CHANGES = 4_096
FIRST_ROWS = 2_048
"""Step rows that a client gets which asks for none in particular."""

MAX_MARKS_A_MESSAGE = 4_096
KEYFRAME_SHARE = 4
"""A keyframe is sent when more than one block in so many has changed: it is then the smaller one."""

MAX_UNPACKED = 4_096
"""Changed cells are packed when a client is due, or when this many have come together, which takes 3 ms: a
tail block changes with each step, and nobody may be looking."""

MAX_UNCODED = 32
"""So many records wait at most for a client before they are put into the rings: a few at once take less."""

_NS_PER_MS = 1e6
_MARK_END_BYTES = 8


class Cursor(msgspec.Struct):
    """How far one client is. `step`: newest row it has, or was told is lost."""

    step: int
    changes: int
    marks: int
    batch_step: int = 0
    has_picture: bool = False
    host: HostCounts | None = None

    def move_to(self, other: "Cursor") -> None:
        """Be as far as another one."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(other, name))


class _Taken(NamedTuple):
    """What a client took that was at `before`, after `step`."""

    step: int
    before: Cursor
    after: Cursor
    frames: list[Frame]


class Journal:
    """Folds records into `snapshot` and keeps bounded rings of rows, marks and changed blocks."""

    def __init__(self, config: EngineConfig, first_snapshot: EngineSnapshot | None = None) -> None:
        """Start with `first_snapshot`, or before the first record."""
        self.snapshot = first_snapshot or EngineSnapshot(config)
        self._first_step = self.snapshot.step + 1
        self._rows = ByteRing(ROW_BYTES, KEPT_ROWS)
        self._marks = ByteRing(MARK_BYTES, KEPT_MARKS)
        self._mark_ends = ByteRing(_MARK_END_BYTES, KEPT_ROWS + 1)  # marks there were after each step
        self._changes = ByteRing(CELL_BYTES, max(config.num_blocks, MIN_KEPT_CHANGES))
        self._keyframe_before = 0  # cursors below this have to take a keyframe
        self._cells = array("I", [BLANK_CELL]) * config.num_blocks
        self._unpacked: set[int] = set()
        self._uncoded: deque[tuple[StepRecord, set[int]]] = deque()
        self._newest_keyframe = Frame(FrameKind.KEYFRAME, first_step=-1)  # clients of one step take the same
        self._newest: _Taken | None = None  # and those of one pace take everything together
        self._newest_batch = Frame(FrameKind.BATCH)
        if first_snapshot is not None:
            self._pack(range(config.num_blocks))

    def fold(self, record: StepRecord) -> set[int]:
        """Move on by one record; return the blocks that may have changed."""
        changed = self.snapshot.apply(record)
        self._unpacked |= changed
        if len(self._unpacked) > MAX_UNPACKED:
            self._pack_changed()
        self._uncoded.append((record, changed))
        if len(self._uncoded) > MAX_UNCODED:
            self._catch_up()
        return changed

    def _catch_up(self) -> None:
        """Put into the rings what has come since somebody looked; what cannot be stays in the way."""
        while self._uncoded:
            record, changed = self._uncoded[0]
            row, marks = encode_row(record), encode_marks(record)
            self._uncoded.popleft()
            self._rows.extend(row)
            self._marks.extend(marks)
            self._mark_ends.extend(self._marks.total.to_bytes(_MARK_END_BYTES, "little"))
            self._changes.extend(array("I", changed).tobytes())
            if any(isinstance(event, Reset) for event in record.events):
                self._keyframe_before = self._changes.total

    def start(self, after: int | None) -> Cursor:
        """Return the cursor of a client that has the rows up to `after` (None: no rows yet)."""
        self._catch_up()
        last = self.snapshot.step
        if after is None or after > last:
            # A step from the future is one of an earlier server: as good as none.
            step = max(last - FIRST_ROWS, self._first_step - 1 + self._rows.oldest)
            # It asks for no marks in particular either: it gets what fits, and has lost nothing.
            marks = max(
                self._num_marks_until(step), self._marks.oldest, self._marks.total - MAX_MARKS_A_MESSAGE
            )
        else:
            step = max(after, self._first_step - 1)
            marks = self._num_marks_until(step)
        return Cursor(step=step, changes=self._changes.total, marks=marks)

    def is_behind(self, cursor: Cursor) -> bool:
        """Whether there is something to take."""
        return cursor.step != self.snapshot.step or not cursor.has_picture

    def take(self, cursor: Cursor) -> list[Frame]:
        """Return the frames that bring a client up to date, and move its cursor there.

        It is the same list for clients that are equally far.
        """
        self._catch_up()
        newest = self._newest
        if newest is None or newest.step != self.snapshot.step or newest.before != cursor:
            before = copy(cursor)
            frames = self._make_frames(cursor)
            newest = self._newest = _Taken(self.snapshot.step, before, copy(cursor), frames)
        else:
            cursor.move_to(newest.after)
        return newest.frames

    def _make_frames(self, cursor: Cursor) -> list[Frame]:
        t_ms = self.snapshot.t_ns / _NS_PER_MS
        frames = [self._take_picture(cursor, t_ms)]
        frames += self._take_rows(cursor, t_ms)
        batch = self.snapshot.last_batch
        if batch is not None and batch.step > cursor.batch_step:
            if self._newest_batch.first_step != batch.step:
                self._newest_batch = make_batch(batch)
            frames.append(self._newest_batch)
            cursor.batch_step = batch.step
        frames += self._take_host(cursor, t_ms)
        frames += self._take_marks(cursor, t_ms)
        return frames

    # ---------------------------------------------------------------- cells

    def _take_picture(self, cursor: Cursor, t_ms: float) -> Frame:
        self._pack_changed()
        start, total = cursor.changes, self._changes.total
        needs_all = not cursor.has_picture or start < max(self._changes.oldest, self._keyframe_before)
        cursor.changes, cursor.has_picture = total, True
        if needs_all:
            return self._make_keyframe(t_ms)
        return self._make_change(start, t_ms)

    def _make_change(self, start: int, t_ms: float) -> Frame:
        """Show what changed since change number `start`; all cells if that is most of them."""
        ids = set(array("I", self._changes.read(start, self._changes.total)))
        if len(ids) * KEYFRAME_SHARE > len(self._cells):
            return self._make_keyframe(t_ms)
        return make_delta(sorted(ids), self._cells, self.snapshot.step, t_ms)

    def _make_keyframe(self, t_ms: float) -> Frame:
        if self._newest_keyframe.first_step != self.snapshot.step:
            self._newest_keyframe = make_keyframe(self._cells, self.snapshot.step, t_ms)
        return self._newest_keyframe

    def _pack_changed(self) -> None:
        num_blocks = len(self._cells)
        if self._unpacked and self.snapshot.num_free == num_blocks:
            self._cells = array("I", [BLANK_CELL]) * num_blocks  # after a reset that is all of them
        else:
            self._pack(self._unpacked)
        self._unpacked.clear()

    def _pack(self, ids: Iterable[int]) -> None:
        cells, block = self._cells, self.snapshot.block
        for block_id in ids:
            cells[block_id] = pack_cell(block(block_id))

    # ---------------------------------------------------------------- rows and marks

    def _take_rows(self, cursor: Cursor, t_ms: float) -> list[Frame]:
        last, oldest = self.snapshot.step, self._first_step + self._rows.oldest
        first = cursor.step + 1
        frames = []
        if first < oldest:
            frames.append(make_gap(first, oldest - first))
            first = oldest
        if first <= last:
            rows = self._rows.read(first - self._first_step, last + 1 - self._first_step)
            frames.append(make_steps(rows, first, t_ms))
        cursor.step = last
        return frames

    def _take_host(self, cursor: Cursor, t_ms: float) -> list[Frame]:
        """Return the host tier's frame if there is a tier and the client knows it otherwise."""
        snapshot = self.snapshot
        if snapshot.config.num_host_blocks == 0:
            return []
        num_loading = sum(view.is_loading for view in snapshot.running)
        counts = HostCounts(**snapshot.host_counts, num_loading=num_loading)
        if counts == cursor.host:
            return []
        cursor.host = counts
        return [make_host(counts, snapshot.step, t_ms)]

    def _take_marks(self, cursor: Cursor, t_ms: float) -> list[Frame]:
        total = self._marks.total
        start = max(cursor.marks, self._marks.oldest, total - MAX_MARKS_A_MESSAGE)
        lost = start - cursor.marks
        cursor.marks = total
        if start == total:
            return []
        marks = self._marks.read(start, total)
        return [make_marks(marks, lost, mark_step(marks), t_ms)]

    def _num_marks_until(self, step: int) -> int:
        """Return how many marks there were after `step`, or after the oldest later step that is known."""
        ends = self._mark_ends
        index = max(step - self._first_step, ends.oldest)
        if step < self._first_step and ends.oldest == 0:
            return 0
        return int.from_bytes(ends.read(index, index + 1), "little")
