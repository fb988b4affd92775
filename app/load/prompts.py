"""Prompts in the MT-bench format: one JSON object per line with the user's turns."""

from itertools import islice
from pathlib import Path

from app.load.files import LoadError, field_error, json_object, read_lines


def read_prompts(path: Path, max_rows: int) -> list[tuple[str, ...]]:
    """Return the turns of the first conversations of a file.

    Raises `LoadError` naming line and field when a line has no `turns`.
    """
    conversations = []
    for number, line in islice(read_lines(path), max_rows):
        record = json_object(path, number, line)
        if "turns" not in record:
            raise field_error(path, number, "turns", "missing")
        turns = record["turns"]
        if not isinstance(turns, list) or not turns:
            raise field_error(path, number, "turns", "not a list with at least one text")
        if not all(isinstance(turn, str) and turn.strip() for turn in turns):
            raise field_error(path, number, "turns", "each turn must be a text that is not empty")
        conversations.append(tuple(turns))
    if not conversations:
        raise LoadError(f"{path}: the file is empty.")
    return conversations
