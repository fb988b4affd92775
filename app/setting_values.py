"""What a setting may be, and how its value is read from text; a `ConfigError` says how to write it.

Digits are those of ASCII, numbers have a length that is quickly read, and no text is empty.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError

MAX_SHOWN_CHARS = 40
MAX_SIZE_BYTES = 2**60
"""More than any machine has; keeps sizes in the range that everything else can count in."""

# Few digits are enough for every allowed value, and reading many takes long.
_SIZE = re.compile(r"([0-9]{1,19})(?:\.([0-9]{1,19}))?[ \t]*([kmgt]i?)?b?", re.IGNORECASE | re.ASCII)
_COUNT = re.compile(r"[+-]?[0-9]{1,19}")
_SECONDS = re.compile(r"[+-]?[0-9]{1,19}(?:\.[0-9]{0,19})?|\.[0-9]{1,19}")
_SIZE_FACTORS: dict[str, int] = {
    "": 1,
    **{f"{letter}i": 1024**power for power, letter in enumerate("kmgt", start=1)},
    **{letter: 1000**power for power, letter in enumerate("kmgt", start=1)},
}


def parse_size(text: str) -> int:
    """Return bytes for `1GiB`, `512 MiB`, `2GB` or a plain number; `ConfigError` for anything else."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{shorten(text)} is not a size; write it like 1GiB or 512MiB.")
    whole, decimals, unit = found[1], found[2] or "", found[3] or ""
    # In integers: a float would lose the last bytes of large sizes.
    scaled = int(whole + decimals) * _SIZE_FACTORS[unit.lower()]
    return int(scaled // 10 ** len(decimals))


def show_size(num_bytes: float) -> str:
    """Return a size in the largest binary unit that it is a whole number of."""
    number, units = int(num_bytes), ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]
    while number and number % 1024 == 0 and len(units) > 1:
        number //= 1024
        units.pop(0)
    return f"{number} {units[0]}" if number != 1 or units[0] != "bytes" else "1 byte"


def parse_seconds(text: str) -> float:
    """Return seconds for `2`, `2.5` or `2s`."""
    number = text.strip().removesuffix("s").strip()
    if _SECONDS.fullmatch(number) is None:
        raise ConfigError(f"{shorten(text)} is not a number of seconds; write it like 5 or 0.5.")
    return float(number)


def parse_count(text: str) -> int:
    """Return a whole number."""
    if _COUNT.fullmatch(text.strip()) is None:
        raise ConfigError(f"{shorten(text)} is not a whole number.")
    return int(text)


def parse_text(text: str) -> str:
    """Return the text itself, which must not be empty."""
    if not text.strip():
        raise ConfigError("the value is empty; leave the setting out for its default.")
    return text


def parse_path(text: str) -> Path:
    """Return a path; `~` is the home folder."""
    return Path(parse_text(text)).expanduser()


def shorten(text: str) -> str:
    """Return a value as an error shows it: quoted, and not without end."""
    return repr(text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "\u2026")


METAVARS: dict[Callable[[str], Any], str] = {
    parse_size: "size",
    parse_seconds: "seconds",
    parse_count: "number",
    parse_path: "folder",
}
"""What stands for a value in a usage line."""


@dataclass(frozen=True)
class Option:
    """What a setting means and which values it takes. `low` and `high` are inclusive."""

    help: str
    parse: Callable[[str], Any] = parse_text
    unit: str = ""
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    shown_default: str = ""

    @property
    def metavar(self) -> str:
        """What stands for a value in a usage line."""
        return "name" if self.choices else METAVARS.get(self.parse, "text")
