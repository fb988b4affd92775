"""Request traces: arrival times and lengths of real traffic, in the formats of their publishers.

The format follows from the columns or fields, and the units follow from the format. A file whose
fields are not exactly those of a known format is refused, since the same names mean other units elsewhere.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from itertools import chain, islice
from pathlib import Path
from typing import Any

from app.load.files import LoadError, field_error, json_object, read_lines

TOKENS_PER_HASH_ID = 512
"""Mooncake: one hash id stands for this many tokens of the prompt."""

MAX_LENGTH = 10_000_000
"""Tokens; a longer request in a trace is a mistake in the file."""

_AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
_MOONCAKE_FIELDS = {"timestamp", "input_length", "output_length", "hash_ids"}
_ISO_MICROSECOND_CHARS = len("2023-11-16 18:15:46.680590")
_MILLISECONDS = 1e-3


class TraceFormat(StrEnum):
    """Who published the trace, and so what its fields mean."""

    AZURE = "azure"
    MOONCAKE = "mooncake"


@dataclass(frozen=True)
class TraceRow:
    """One request; lengths in tokens as recorded, arrival relative to the first row."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] | None
    """One id per 512 prompt tokens, equal ids for equal tokens; None where the trace does not say."""


@dataclass(frozen=True)
class Trace:
    """The first rows of a trace file, in order of arrival."""

    format: TraceFormat
    rows: list[TraceRow]


def read_trace(path: Path, max_rows: int) -> Trace:
    """Read the first rows of an Azure CSV or a Mooncake JSONL trace.

    Raises `LoadError` naming line and field when the file is not such a trace.
    """
    lines = read_lines(path)
    first = next(lines, None)
    if first is None:
        raise LoadError(f"{path}: the file is empty.")
    number, line = first
    if line.startswith("{"):
        rows = (_mooncake_row(path, *numbered) for numbered in chain([first], lines))
        trace_format = TraceFormat.MOONCAKE
    elif line.split(",") == _AZURE_COLUMNS:
        rows = (_azure_row(path, *numbered) for numbered in lines)
        trace_format = TraceFormat.AZURE
    else:
        raise LoadError(
            f"{path}: line {number} is neither the header {','.join(_AZURE_COLUMNS)} (Azure) nor a JSON "
            f"object with {', '.join(sorted(_MOONCAKE_FIELDS))} (Mooncake); other traces are not supported."
        )
    relative = list(_relative(path, islice(rows, max_rows)))
    if not relative:
        raise LoadError(f"{path}: there is no request in the file.")
    return Trace(trace_format, relative)


def _relative(path: Path, rows: Iterator[tuple[int, TraceRow]]) -> Iterator[TraceRow]:
    """Yield the rows with arrival times counted from the first one."""
    first_s = last_s = None
    for number, row in rows:
        if last_s is not None and row.arrival_s < last_s:
            raise field_error(path, number, "timestamp", "earlier than the row before")
        last_s = row.arrival_s
        first_s = row.arrival_s if first_s is None else first_s
        yield TraceRow(row.arrival_s - first_s, row.num_prompt_tokens, row.num_output_tokens, row.hash_ids)


def _azure_row(path: Path, number: int, line: str) -> tuple[int, TraceRow]:
    values = line.split(",")
    if len(values) != len(_AZURE_COLUMNS):
        raise LoadError(
            f"{path}: line {number} has {len(values)} columns, expected are {len(_AZURE_COLUMNS)}."
        )
    time_text, *lengths = values
    try:
        # Seven decimals in the file, Python knows six.
        arrival = datetime.fromisoformat(time_text[:_ISO_MICROSECOND_CHARS])
    except ValueError as error:
        raise field_error(path, number, "TIMESTAMP", f"{time_text[:40]!r} is not a date and time") from error
    arrival_s = (arrival if arrival.tzinfo else arrival.replace(tzinfo=UTC)).timestamp()
    numbers = []
    for field, text in zip(_AZURE_COLUMNS[1:], lengths, strict=True):
        if not (text.isascii() and text.isdigit() and len(text) < len(str(MAX_LENGTH))):
            raise field_error(path, number, field, f"{text[:40]!r} is not a number of tokens")
        numbers.append(int(text))
    return number, TraceRow(arrival_s, numbers[0], numbers[1], None)


def _mooncake_row(path: Path, number: int, line: str) -> tuple[int, TraceRow]:
    record = json_object(path, number, line)
    missing = sorted(_MOONCAKE_FIELDS - record.keys())
    if missing:
        raise field_error(path, number, missing[0], "missing")
    unknown = sorted(record.keys() - _MOONCAKE_FIELDS)
    if unknown:
        raise field_error(
            path, number, unknown[0], "not part of a Mooncake trace, so the units of the others are not known"
        )
    row = TraceRow(
        arrival_s=_whole_number(path, number, record, "timestamp") * _MILLISECONDS,
        num_prompt_tokens=_whole_number(path, number, record, "input_length"),
        num_output_tokens=_whole_number(path, number, record, "output_length"),
        hash_ids=_hash_ids(path, number, record["hash_ids"]),
    )
    num_expected = -(-row.num_prompt_tokens // TOKENS_PER_HASH_ID)
    if row.hash_ids is None or len(row.hash_ids) != num_expected:
        problem = (
            f"expected are {num_expected} whole numbers, one per {TOKENS_PER_HASH_ID} tokens of input_length"
        )
        raise field_error(path, number, "hash_ids", problem)
    return number, row


def _whole_number(path: Path, number: int, record: dict[str, Any], field: str) -> int:
    value = record[field]
    limit = 2**53 if field == "timestamp" else MAX_LENGTH
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= limit:
        raise field_error(path, number, field, f"{str(value)[:40]} is not a whole number from 0 to {limit}")
    return value


def _hash_ids(path: Path, number: int, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise field_error(path, number, "hash_ids", "not a list of whole numbers")
    return tuple(value)
