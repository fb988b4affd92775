"""From recorded bytes to states and to the frames of the live view. Pure, to be called off the loop."""

import zlib
from collections.abc import Iterable, Sequence

import msgspec

from app.errors import HistoryUnavailableError
from app.history.record_codec import decode_records, decode_state
from app.realtime.frames import DEFLATE_OVER_BYTES, Frame, FrameKind, Hello, make_gap, make_hello
from app.realtime.journal import Journal
from engine.config import EngineConfig
from engine.engine_info import EngineInfo
from engine.errors import EngineInvariantError
from engine.records import StepRecord
from engine.snapshot import EngineSnapshot

RECORDED = "recorded"
"""`status` in the HELLO of a recorded session."""

_NS_PER_MS = 1e6
_DEFLATE_LEVEL = 1


def restore(config: EngineConfig, data: bytes) -> EngineSnapshot:
    """Return a stored state as a snapshot of one's own; raises `HistoryUnavailableError` if it is damaged."""
    try:
        return EngineSnapshot.from_state(config, decode_state(data))
    except (LookupError, ValueError) as error:
        raise HistoryUnavailableError(f"A recorded state is damaged: {error}.") from error


def copy(snapshot: EngineSnapshot) -> EngineSnapshot:
    """Return a snapshot of one's own."""
    return EngineSnapshot.from_state(snapshot.config, snapshot.export_state())


def fold(snapshot: EngineSnapshot, chunks: Iterable[bytes], last: int) -> None:
    """Move `snapshot` on to step `last`, or as far as the steps in `chunks` follow each other."""
    for record in read_records(chunks, snapshot.step + 1, last):
        if record.step != snapshot.step + 1:
            return
        _apply(snapshot, record)


def read_records(chunks: Iterable[bytes], first: int, last: int) -> list[StepRecord]:
    """Return the records of steps `first` to `last` that are there."""
    return [record for data in chunks for record in decode_records(data) if first <= record.step <= last]


def _apply(snapshot: EngineSnapshot, record: StepRecord) -> None:
    try:
        snapshot.apply(record)
    except (EngineInvariantError, LookupError, ValueError) as error:
        raise HistoryUnavailableError(f"Step {record.step} is damaged: {error}.") from error


class Passage(msgspec.Struct, frozen=True, kw_only=True):
    """What frames are made of.

    `start` is the state before the first message: that of step `first_step` - 1, or of the end of the gap
    that the passage begins in. It is used up. `bases` are the states after later gaps, `gaps` all gaps as
    (first, number of steps) by the last step in them.
    """

    session: str
    model: str
    config: EngineConfig
    engine: EngineInfo | None = None
    first_step: int
    start: EngineSnapshot
    chunks: Sequence[bytes]
    bases: dict[int, bytes]
    gaps: dict[int, tuple[int, int]]


def make_frames(passage: Passage, last: int) -> bytes:
    """Return the frames of the live view up to step `last`: one message for the state, one for each step."""
    start = passage.start
    hello = Hello(
        session=passage.session,
        status=RECORDED,
        model=passage.model,
        step=passage.first_step - 1,
        config=passage.config,
        engine=passage.engine,
    )
    player = _Player(start)
    frames = [make_hello(hello, start.t_ns / _NS_PER_MS), *player.show(passage.gaps.get(start.step))]
    bases = dict(passage.bases)
    for record in read_records(passage.chunks, start.step + 1, last):
        while record.step != player.step + 1:
            frames += _leap(player, passage, bases)
        frames += player.play(record)
    while any(step > player.step for step in bases):
        frames += _leap(player, passage, bases)
    return b"".join(_deflate(frame).encode() for frame in frames)


def _leap(player: "_Player", passage: Passage, bases: dict[int, bytes]) -> list[Frame]:
    """Go on after a gap, with the next state that is known."""
    step = min((step for step in bases if step > player.step), default=None)
    if step is None:
        raise HistoryUnavailableError(f"Nothing is recorded of the steps after {player.step}.")
    player.leap(restore(passage.config, bases.pop(step)))
    return player.show(passage.gaps.get(step))


class _Player:
    """A journal and the one client that it serves, which gets each step by itself."""

    def __init__(self, start: EngineSnapshot) -> None:
        self._journal = Journal(start.config, start)
        self._cursor = self._journal.start(start.step)

    @property
    def step(self) -> int:
        """The step whose state is shown."""
        return self._journal.snapshot.step

    def leap(self, start: EngineSnapshot) -> None:
        """Go on from another state."""
        batch_step = self._cursor.batch_step
        self._journal = Journal(start.config, start)
        self._cursor = self._journal.start(start.step)
        self._cursor.batch_step = batch_step

    def show(self, gap: tuple[int, int] | None) -> list[Frame]:
        """Return the message of the whole state; `gap`: the steps that were lost right before it."""
        picture, *others = self._journal.take(self._cursor)
        return [picture, *([make_gap(*gap)] if gap is not None else []), *others]

    def play(self, record: StepRecord) -> list[Frame]:
        """Return the message of one step."""
        try:
            self._journal.fold(record)
        except (EngineInvariantError, LookupError, ValueError) as error:
            raise HistoryUnavailableError(f"Step {record.step} is damaged: {error}.") from error
        return self._journal.take(self._cursor)


def _deflate(frame: Frame) -> Frame:
    if frame.kind != FrameKind.KEYFRAME or len(frame.payload) <= DEFLATE_OVER_BYTES:
        return frame
    deflater = zlib.compressobj(_DEFLATE_LEVEL, wbits=-zlib.MAX_WBITS)
    return frame._replace(payload=deflater.compress(frame.payload) + deflater.flush(), deflated=True)
