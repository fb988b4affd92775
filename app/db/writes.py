"""What is put to be written, and in which order the puts of one transaction are made."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import attrgetter
from typing import Any

from sqlalchemy import Executable

_ROW_BYTES = 256
"""What a row takes in memory beside its texts and blobs."""

Rows = Sequence[Mapping[str, Any]]


class Turn(IntEnum):
    """Which writes of a transaction come first, whatever the order in which they were put.

    To run a statement costs a tenth of a millisecond; rows by the thousand cost little more than one. So
    the statements that come with steps are told apart by their turns, and all rows of one turn are one
    statement. That is right because no row is changed in a turn before the one that makes it, nor refers to
    one of a later turn.
    """

    REQUEST = 1
    TEXT = 2
    CHANGE = 3
    EVENT = 4
    OUTPUT = 5
    DELIVERY = 6
    """What the client got counts more than what a change said before."""

    STEPS = 7
    SESSION = 8
    OLD_STEPS = 9
    """Steps that compact rows take the place of: their small rows were put before."""

    COMPACT_STEPS = 10
    STATE = 11
    METRICS = 12


@dataclass(frozen=True)
class Write:
    """One statement with its rows, which all have the same keys.

    `num_steps` step records are lost if it is; `on_lost` is told then, on the event loop. `num_bytes` is
    what it holds in memory, 0: to be counted. Those with a `turn` that follow each other are written by
    turns, those without stay exactly where they were put.
    """

    statement: Executable
    rows: Rows = ()
    num_bytes: int = 0
    num_steps: int = 0
    on_lost: Callable[[], None] | None = None
    turn: Turn | None = None


@dataclass(frozen=True)
class Put:
    """What is written in one transaction, and about what it takes in memory."""

    writes: tuple[Write, ...]
    num_bytes: int


def count_rows(writes: Sequence[Write]) -> int:
    """Return how many rows are lost if these writes are; a statement without rows counts as one."""
    return sum(max(1, len(write.rows)) for write in writes)


def measure(write: Write) -> int:
    """Return about how many bytes of memory a write takes."""
    if write.num_bytes:
        return write.num_bytes
    texts = (len(value) for row in write.rows for value in row.values() if isinstance(value, (str, bytes)))
    return _ROW_BYTES * max(1, len(write.rows)) + sum(texts)


def merge(batch: Sequence[Put]) -> Iterator[tuple[Executable, list[Mapping[str, Any]]]]:
    """Yield statements in order, those that follow each other with the same columns as one."""
    statement: Executable | None = None
    rows: list[Mapping[str, Any]] = []
    for write in _take_turns(batch):
        is_same = write.statement is statement and rows and write.rows
        if is_same and write.rows[0].keys() == rows[0].keys():
            rows.extend(write.rows)
            continue
        if statement is not None:
            yield statement, rows
        statement, rows = write.statement, list(write.rows)
    if statement is not None:
        yield statement, rows


def _take_turns(batch: Sequence[Put]) -> list[Write]:
    """Return the writes in the order in which they are to be made (`Turn`)."""
    ordered: list[Write] = []
    in_turns: list[Write] = []
    for write in (write for put in batch for write in put.writes):
        if write.turn is not None:
            in_turns.append(write)
            continue
        ordered += [*sorted(in_turns, key=attrgetter("turn")), write]
        in_turns = []
    return ordered + sorted(in_turns, key=attrgetter("turn"))
