"""Fail when a source file or a function is longer than the project allows.

Run from anywhere: `python scripts/check_lengths.py`. Prints one line per offence, exit code 1 if any.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_SOURCE_LINES = 400
MAX_TEST_LINES = 500
MAX_FUNCTION_LINES = 50
FOLDERS = ("app", "engine", "bench", "scripts", "static", "templates", "migrations", "tests")
SUFFIXES = {".py", ".js", ".mjs", ".css", ".html", ".h", ".cpp"}
SKIPPED = ("static/vendor/", "migrations/versions/")
"""Copied files, and migrations: generated lists of columns, which do not read better in pieces."""


def source_files(root: Path) -> Iterator[Path]:
    """Yield the checked files below `root`, sorted."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            relative = path.relative_to(root).as_posix()
            if path.suffix in SUFFIXES and path.is_file() and not relative.startswith(SKIPPED):
                yield path


def long_functions(source: str) -> Iterator[tuple[str, int, int]]:
    """Yield (name, first line, number of lines) of each Python function that is too long."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                yield node.name, node.lineno, num_lines


def check(root: Path) -> list[str]:
    """Return one line per file or function that is too long."""
    offences = []
    for path in source_files(root):
        relative = path.relative_to(root).as_posix()
        source = path.read_text(encoding="utf-8")
        num_lines = len(source.splitlines())
        limit = MAX_TEST_LINES if relative.startswith("tests/") else MAX_SOURCE_LINES
        if num_lines > limit:
            offences.append(f"{relative}: {num_lines} lines, allowed are {limit}")
        if path.suffix == ".py":
            offences.extend(
                f"{relative}:{line}: {name} has {length} lines, allowed are {MAX_FUNCTION_LINES}"
                for name, line, length in long_functions(source)
            )
    return offences


def main() -> int:
    """Print the offences of this repository."""
    offences = check(ROOT)
    for offence in offences:
        print(offence)
    return 1 if offences else 0


if __name__ == "__main__":
    sys.exit(main())
