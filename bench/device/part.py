"""What all parts of the device check share: options, and findings that are on disk as soon as they are known.

A part is a module of this folder that runs in a process of its own: `python -m bench.device.PART`, with
`--json FILE`. With `--tiny --device cpu` it does the same with next to nothing to compute, so that all of it
can be tried where there is no GPU.
"""

import argparse
import importlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NO_DEVICE_STATUS = 3
"""The exit status of the first part when there is no GPU."""

CEILINGS_FILE = "ceilings.json"
"""Beside the findings of the other parts: what they are compared with."""


@dataclass(frozen=True)
class Options:
    """How to run a part: on which device, how much of it, where to, and for how many seconds at most."""

    device: str
    is_tiny: bool
    json: Path
    limit_s: float

    @property
    def is_cuda(self) -> bool:
        """Whether there is a GPU to be measured."""
        return self.device != "cpu"


class Findings:
    """A JSON object in a file that is whole at any time, however the process ends."""

    def __init__(self, path: Path) -> None:
        """Begin with nothing found."""
        self.values: dict[str, Any] = {}
        self._path = path

    def put(self, name: str, value: Any) -> None:
        """Add a value, or replace it."""
        self.values[name] = value
        self.write()

    def append(self, name: str, value: Any) -> None:
        """Add a value to a list."""
        self.values.setdefault(name, []).append(value)
        self.write()

    def write(self) -> None:
        """Write all of it; the file changes at once or not at all."""
        write_json(self._path, self.values)


def write_json(path: Path, value: object) -> None:
    """Replace a file by a value as JSON, at once."""
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    new.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    new.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file, an empty one if there is none."""
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return value


class Clock:
    """How much of a part's time is left."""

    def __init__(self, limit_s: float) -> None:
        """Begin now."""
        self._ends_s = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        """Seconds that are left, 0 when there are none."""
        return max(0.0, self._ends_s - time.monotonic())


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser for the options that every part takes."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="default: %(default)s")
    made.add_argument("--tiny", action="store_true", help="next to nothing, to see that it works")
    made.add_argument("--json", type=Path, required=True, metavar="FILE", help="where the findings go")
    made.add_argument("--limit-s", type=float, default=120.0, help="seconds it shall take at most")
    return made


def options_of(arguments: argparse.Namespace) -> Options:
    """Return what `parser` took. Without a GPU, Triton is told to interpret from here on."""
    if arguments.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is imported
        importlib.import_module("tests.support.triton_interpreter")
    return Options(arguments.device, arguments.tiny, arguments.json, arguments.limit_s)


def parse(description: str | None) -> Options:
    """Return the options of a part that takes no others."""
    return options_of(parser(description).parse_args())
