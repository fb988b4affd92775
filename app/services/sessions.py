"""Recorded sessions: the engine's state at any step, and its steps as records and as frames.

A state is the newest stored one at or before the step, moved on by the records in between. Stored states are
only a shortcut: without them the same comes out, from the session's start or from the end of a gap.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec

from app.db.database import Database
from app.errors import HistoryUnavailableError, NotInHistoryError
from app.history.step_log import CHUNK_STEPS
from app.realtime.decisions import StepDecisions, make_decisions
from app.services.session_replay import Passage, copy, fold, make_frames, read_records, restore
from app.services.session_rows import (
    Bookmark,
    Gap,
    Marker,
    SessionInfo,
    read_bases,
    read_bookmarks,
    read_chunks,
    read_gaps,
    read_markers,
    read_near_preemptions,
    read_newest_state,
    read_session,
    read_sessions,
    read_whole_session,
)
from app.services.workers import Workers
from engine.records import StepRecord
from engine.snapshot import EngineSnapshot

NUM_WORKERS = 2
MAX_WAITING_CALLS = 128

READ_ROWS = 64
"""Rows of records that are read and folded in one go: at most 16,384 steps."""

MAX_KEPT_STATES = 16
MAX_KEPT_BLOCKS = 400_000
"""Of all kept states together; a block takes about 30 bytes."""

MAX_KEPT_FRAME_BYTES = 16 * 2**20

T = TypeVar("T")


class ChunkFrames(msgspec.Struct, frozen=True):
    """Frames of up to 256 steps; `is_whole`: they will always be these."""

    data: bytes
    is_whole: bool


class SessionReader:
    """Reads the history for pages and programs. Lives on the event loop; work on steps is done beside it.

    Everything may raise `HistoryUnavailableError`, and `NotInHistoryError` for what is not recorded.
    """

    def __init__(self, database: Database) -> None:
        """Read from `database`."""
        self._database = database
        self._workers = Workers("pageglass-replay", num_workers=NUM_WORKERS, max_waiting=MAX_WAITING_CALLS)
        self._states: OrderedDict[tuple[str, int], EngineSnapshot] = OrderedDict()
        self._frames: OrderedDict[tuple[str, int], ChunkFrames] = OrderedDict()

    async def call_worker(self, function: Callable[[], T]) -> T:
        """Return what `function` returns, called off the event loop; raises `QueueFullError`."""
        return await self._workers.run(function)

    # ---------------------------------------------------------------- facts

    async def list_sessions(self, limit: int, before: tuple[int, str] | None = None) -> list[SessionInfo]:
        """Return the newest sessions, or the newest that began before `before` (start in ns, id)."""
        async with self._database.read() as db:
            return await read_sessions(db, limit, before)

    async def facts(self, session_id: str) -> SessionInfo:
        """Return one session without its sums, which is quick."""
        async with self._database.read() as db:
            return await read_session(db, session_id)

    async def get(self, session_id: str) -> SessionInfo:
        """Return one session."""
        async with self._database.read() as db:
            return await read_whole_session(db, session_id)

    async def gaps(self, info: SessionInfo) -> list[Gap]:
        """Return which steps are missing between the session's first and last one, in order."""
        async with self._database.read() as db:
            return await read_gaps(db, info)

    async def bookmarks(self, session_id: str) -> list[Bookmark]:
        """Return a session's bookmarks by step."""
        async with self._database.read() as db:
            return await read_bookmarks(db, session_id)

    async def markers(self, session_id: str, after: int = -1) -> tuple[list[Marker], bool]:
        """Return the first markers later than step `after`, by step, and whether there are more."""
        async with self._database.read() as db:
            return await read_markers(db, await read_session(db, session_id), after)

    # ---------------------------------------------------------------- states

    async def snapshot_at(self, session_id: str, step: int | None = None) -> EngineSnapshot:
        """Return the state after a step, by default the last one. It is shared: read it only."""
        info = await self._read_info(session_id)
        wanted = info.last_step if step is None else step
        _check_range(info, wanted)
        snapshot = await self._find_state(info, wanted)
        if snapshot is None:
            raise await self._not_recorded(info, wanted)
        return snapshot

    async def check_step(self, session_id: str, step: int) -> None:
        """Raise `NotInHistoryError` if the state after a step is not recorded, without working it out."""
        info = await self._read_info(session_id)
        _check_range(info, step)
        for gap in await self.gaps(info):
            if gap.first_step <= step < gap.last_step:
                raise _in_gap(info, step, gap)

    async def _find_state(self, info: SessionInfo, step: int) -> EngineSnapshot | None:
        """Return the state after a step, None in a gap."""
        kept = self._states.get((info.id, step))
        if kept is not None:
            self._states.move_to_end((info.id, step))
            return kept
        snapshot = await self._find_start(info, step)
        while snapshot is not None and snapshot.step < step:
            async with self._database.read() as db:
                chunks = await read_chunks(db, info.id, snapshot.step + 1, step, READ_ROWS)
            before = snapshot.step
            await self._workers.run(partial(fold, snapshot, chunks, step))
            if snapshot.step == before:
                return None
        if snapshot is not None:
            self._keep_state(info.id, snapshot)
        return snapshot

    async def _find_start(self, info: SessionInfo, step: int) -> EngineSnapshot | None:
        """Return a snapshot to move on from, the nearest one that is stored or kept."""
        config = info.config
        assert config is not None, "sessions without steps were refused"  # noqa: S101
        async with self._database.read() as db:
            stored = await read_newest_state(db, info.id, step)
        kept = [at for name, at in self._states if name == info.id and at <= step]
        if kept and (stored is None or max(kept) > stored[0]):
            return await self._workers.run(partial(copy, self._states[info.id, max(kept)]))
        if stored is not None:
            return await self._workers.run(partial(restore, config, stored[1]))
        return EngineSnapshot(config) if info.first_step == 1 else None

    def _keep_state(self, session_id: str, snapshot: EngineSnapshot) -> None:
        self._states[session_id, snapshot.step] = snapshot
        most = min(MAX_KEPT_STATES, MAX_KEPT_BLOCKS // snapshot.config.num_blocks)
        while len(self._states) > max(1, most):
            self._states.popitem(last=False)

    # ---------------------------------------------------------------- steps

    async def records(self, session_id: str, first: int, last: int) -> list[StepRecord]:
        """Return the records of steps `first` to `last` that are there, in order."""
        await self._read_info(session_id)
        records: list[StepRecord] = []
        following = first
        while following <= last:
            async with self._database.read() as db:
                chunks = await read_chunks(db, session_id, following, last, READ_ROWS)
            found = await self._workers.run(partial(read_records, chunks, following, last))
            if not found:
                break
            records += found
            following = found[-1].step + 1
        return records

    async def decisions(self, session_id: str, step: int) -> StepDecisions:
        """Return what the scheduler decided in a step."""
        info = await self._read_info(session_id)
        if not info.first_step <= step <= info.last_step:
            raise _out_of_range(info, step)
        before = await self._find_state(info, step - 1)
        records = await self.records(session_id, step, step)
        if before is None or not records:
            raise await self._not_recorded(info, step)
        return make_decisions(before, records[0])

    async def near_preemptions(self, session_id: str, step: int) -> tuple[int | None, int | None]:
        """Return the last step with a preemption before `step` and the first one after it."""
        async with self._database.read() as db:
            return await read_near_preemptions(db, await read_session(db, session_id), step)

    async def chunk_frames(self, session_id: str, first_step: int) -> ChunkFrames:
        """Return the frames of the state before `first_step` and of up to 256 steps from there."""
        info = await self._read_info(session_id)
        last = self.check_chunk(info, first_step)
        kept = self._frames.get((session_id, first_step))
        if kept is not None:
            self._frames.move_to_end((session_id, first_step))
            return kept
        passage = await self._read_passage(info, first_step, last)
        data = await self._workers.run(partial(make_frames, passage, last))
        is_complete = info.last_step >= last and not passage.gaps
        frames = ChunkFrames(data, is_whole=is_complete or not info.is_running)
        if frames.is_whole:
            self._keep_frames((session_id, first_step), frames)
        return frames

    def check_chunk(self, info: SessionInfo, first_step: int) -> int:
        """Return the last step of the chunk that begins at `first_step`, which must be one that is there."""
        start = (max(1, first_step) - 1) // CHUNK_STEPS * CHUNK_STEPS + 1
        if first_step != start:
            raise NotInHistoryError(
                f"No chunk begins at step {first_step}: chunks have {CHUNK_STEPS} steps, "
                f"and step {max(1, first_step)} is in the chunk that begins at {start}."
            )
        last = start + CHUNK_STEPS - 1
        if start - 1 > info.last_step or last < info.first_step:
            raise _out_of_range(info, first_step)
        return last

    async def _read_passage(self, info: SessionInfo, first_step: int, last: int) -> Passage:
        assert info.config is not None, "sessions without steps were refused"  # noqa: S101
        last = min(last, info.last_step)
        start = None
        if first_step >= info.first_step:
            start = await self._find_state(info, first_step - 1)
        async with self._database.read() as db:
            chunks = await read_chunks(db, info.id, first_step, last, CHUNK_STEPS)
            bases = await read_bases(db, info.id, first_step, last)
            is_broken = start is None or bool(bases)
            gaps = await read_gaps(db, info) if is_broken else []
        if start is not None:
            start = await self._workers.run(partial(copy, start))
        elif bases:
            start = await self._workers.run(partial(restore, info.config, bases.pop(min(bases))))
        else:
            raise await self._not_recorded(info, first_step)
        lost = {gap.last_step: (gap.first_step, gap.num_steps) for gap in gaps}
        if info.first_step > 1:  # what was given up for space is not there either
            lost.setdefault(info.first_step - 1, (1, info.first_step - 1))
        return Passage(
            session=info.id,
            model=info.model,
            config=info.config,
            engine=info.engine,
            first_step=first_step,
            start=start,
            chunks=chunks,
            bases=bases,
            gaps=lost if is_broken else {},
        )

    def _keep_frames(self, key: tuple[str, int], frames: ChunkFrames) -> None:
        self._frames[key] = frames
        while sum(len(kept.data) for kept in self._frames.values()) > MAX_KEPT_FRAME_BYTES:
            self._frames.popitem(last=False)

    # ---------------------------------------------------------------- what is not there

    async def _read_info(self, session_id: str) -> SessionInfo:
        info = await self.facts(session_id)
        if info.config is None:
            raise NotInHistoryError(
                f"Session {session_id} has no steps: its server ended before the model was loaded."
                if not info.is_running
                else f"Session {session_id} has no steps yet: the model is being loaded."
            )
        if info.first_step > max(1, info.last_step):
            raise NotInHistoryError(f"The steps of session {session_id} were given up for space.")
        return info

    async def _not_recorded(self, info: SessionInfo, step: int) -> Exception:
        for gap in await self.gaps(info):
            if gap.first_step <= step <= gap.last_step:
                return _in_gap(info, step, gap)
        return HistoryUnavailableError(f"The records before step {step} cannot be read.")


def _check_range(info: SessionInfo, step: int) -> None:
    if not info.first_step - 1 <= step <= info.last_step:
        raise _out_of_range(info, step)


def _in_gap(info: SessionInfo, step: int, gap: Gap) -> NotInHistoryError:
    return NotInHistoryError(
        f"Step {step} is not recorded: steps {gap.first_step} to {gap.last_step} were lost. "
        f"Recorded are steps {info.first_step} to {info.last_step} without these."
    )


def _out_of_range(info: SessionInfo, step: int) -> NotInHistoryError:
    steps = f"steps {info.first_step} to {info.last_step}"
    if info.last_step < info.first_step:
        steps = "no steps yet" if info.is_running else "no steps"
    return NotInHistoryError(f"Step {step} is not recorded: session {info.id} has {steps}.")
