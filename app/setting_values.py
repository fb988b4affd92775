"""What a setting may be, and how its value is read from text; a `ConfigError` says how to write it.

Digits are those of ASCII, numbers have a length that is quickly read, and no text is empty.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from engine.config import MAX_PRIORITY
from engine.errors import ConfigError

ENV_PREFIX = "PAGEGLASS_"
MAX_SHOWN_CHARS = 40
MAX_SIZE_BYTES = 2**60
"""More than any machine has; keeps sizes in the range that everything else can count in."""

# Few digits are enough for every allowed value, and reading many takes long.
_SIZE = re.compile(r"([0-9]{1,19})(?:\.([0-9]{1,19}))?[ \t]*([kmgt]i?)?b?", re.IGNORECASE | re.ASCII)
_COUNT = re.compile(r"[+-]?[0-9]{1,19}")
_NUMBER = re.compile(r"[+-]?[0-9]{1,19}(?:\.[0-9]{0,19})?|\.[0-9]{1,19}")
_PRIORITY_CLASS = re.compile(r"([A-Za-z][A-Za-z0-9_-]{0,31})=([+-]?[0-9]{1,4})", re.ASCII)
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
    if _NUMBER.fullmatch(number) is None:
        raise ConfigError(f"{shorten(text)} is not a number of seconds; write it like 5 or 0.5.")
    return float(number)


def parse_share(text: str) -> float:
    """Return a share of a whole, such as `0.9`."""
    if _NUMBER.fullmatch(text.strip()) is None:
        raise ConfigError(f"{shorten(text)} is not a share; write it like 0.9.")
    return float(text)


def parse_count(text: str) -> int:
    """Return a whole number."""
    if _COUNT.fullmatch(text.strip()) is None:
        raise ConfigError(f"{shorten(text)} is not a whole number.")
    return int(text)


class PriorityClass(NamedTuple):
    """A name for a priority; lower numbers are more urgent."""

    name: str
    number: int


def parse_priority_class(text: str) -> PriorityClass:
    """Return the class that `NAME=NUMBER` stands for."""
    found = _PRIORITY_CLASS.fullmatch(text.strip())
    if found is None or abs(int(found[2])) > MAX_PRIORITY:
        raise ConfigError(
            f"{shorten(text)} is not a priority class; write it like premium=-10: at most 32 letters, "
            f"digits, - and _, beginning with a letter, and a number from -{MAX_PRIORITY} to {MAX_PRIORITY}."
        )
    return PriorityClass(found[1], int(found[2]))


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
    parse_share: "share",
    parse_count: "number",
    parse_path: "folder",
    parse_priority_class: "name=number",
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


@dataclass(frozen=True)
class Setting:
    """One row of the table of settings."""

    name: str
    option: Option
    default: Any
    is_list: bool

    @property
    def flag(self) -> str:
        """Its command-line flag."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return ENV_PREFIX + self.name.upper()

    @property
    def shown_default(self) -> str:
        """Its default for people."""
        return self.option.shown_default or str(self.default)

    def parse(self, text: str, source: str) -> Any:
        """Return the value that `text` means.

        Raises `ConfigError` naming `source` (the flag or variable that it comes from) and what is allowed.
        """
        option = self.option
        if option.choices and text not in option.choices:
            raise ConfigError(f"{source} is {shorten(text)}; allowed: {', '.join(option.choices)}.")
        try:
            value = option.parse(text)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None
        if (option.low is not None and not value >= option.low) or (
            option.high is not None and not value <= option.high
        ):
            raise ConfigError(f"{source} is {text}; allowed: {self.shown_range}.")
        return value

    @property
    def shown_range(self) -> str:
        """Its allowed values for people."""
        option = self.option
        if option.choices:
            return ", ".join(option.choices)
        if option.low is None:
            return ""
        show = show_size if option.parse is parse_size else _show
        return (
            f"{show(option.low)} or more"
            if option.high is None
            else f"{show(option.low)} to {show(option.high)}"
        )


def _show(number: float) -> str:
    return str(int(number)) if number == int(number) else str(number)


def read_table(settings: type[msgspec.Struct], base: type[msgspec.Struct]) -> tuple[Setting, ...]:
    """Return a row for each field of a struct, those that it has from `base` last.

    The types of the fields are annotated with an `Option` each.
    """
    hints = get_type_hints(settings, include_extras=True)
    rows = []
    for field in msgspec.structs.fields(settings):
        kind, option = get_args(hints[field.name])
        default = None if field.default is msgspec.NODEFAULT else field.default
        rows.append(Setting(field.name, option, default, is_list=get_origin(kind) is tuple))
    return tuple(sorted(rows, key=lambda row: row.name in base.__struct_fields__))


def render_rows(settings: Iterable[Setting]) -> list[str]:
    """Return the lines of a table of settings in Markdown."""
    lines = [
        "| flag | environment variable | default | unit | allowed | what it does |",
        "|---|---|---|---|---|---|",
    ]
    for row in settings:
        cells = (
            f"`{row.flag}`",
            f"`{row.variable}`",
            row.shown_default,
            row.option.unit,
            row.shown_range,
            row.option.help,
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines
