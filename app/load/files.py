"""Reading input files line by line, with errors that name the line and the field."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import EngineError

MAX_LINE_CHARS = 1 << 20


class LoadError(EngineError):
    """The load cannot be sent: a file, an option or the server is not as it must be."""


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, line without its end) of a UTF-8 text file; blank lines are left out."""
    number = 0
    try:
        with path.open(encoding="utf-8-sig", newline=None) as file:
            while line := file.readline(MAX_LINE_CHARS + 1):
                number += 1
                if len(line) > MAX_LINE_CHARS:
                    raise LoadError(f"{path}: line {number} has more than {MAX_LINE_CHARS} characters.")
                if line.strip():
                    yield number, line.strip()
    except UnicodeDecodeError as error:
        raise LoadError(f"{path}: line {number + 1} or a later one is not UTF-8 text.") from error
    except OSError as error:
        raise LoadError(f"{path}: {error.strerror or error}.") from error


def json_object(path: Path, number: int, line: str) -> dict[str, Any]:
    """Return the JSON object on a line."""
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise LoadError(f"{path}: line {number} is not a JSON object: {error}.") from error


def field_error(path: Path, number: int, field: str, problem: str) -> LoadError:
    """Return the error about one field of one line."""
    return LoadError(f"{path}: line {number}, field {field}: {problem}.")
