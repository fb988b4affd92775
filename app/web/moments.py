"""Moments for people and programs: stored as Unix nanoseconds, told in UTC, whatever the server's zone."""

import re
from datetime import UTC, datetime
from typing import Final

from engine.errors import RequestError

_NS_PER_S: Final = 1_000_000_000
_NS_PER_MS: Final = 1_000_000
_NS_PER_US: Final = 1_000
_US_PER_S: Final = 1_000_000
_ZONE: Final = re.compile(r"\s*(?:UTC|GMT|Z)\s*$", re.IGNORECASE)
_FIRST_YEAR: Final = 1970
_LAST_YEAR: Final = 2200
"""The database's integers end in 2262."""

EXAMPLE: Final = "2026-11-30T04:15:07Z"


def to_rfc3339(t_ns: int) -> str:
    """Return Unix nanoseconds as RFC 3339 with Z and microseconds, such as `2026-11-30T04:15:07.250000Z`."""
    return f"{_whole_seconds(t_ns):%Y-%m-%dT%H:%M:%S}.{t_ns % _NS_PER_S // _NS_PER_US:06d}Z"


def to_words(t_ns: int) -> str:
    """Return Unix nanoseconds as people read them, such as `2026-11-30 04:15:07 UTC`."""
    return f"{_whole_seconds(t_ns):%Y-%m-%d %H:%M:%S} UTC"


def to_exact_words(t_ns: int) -> str:
    """Return Unix nanoseconds with milliseconds, such as `2026-11-30 04:15:07.250 UTC`."""
    return f"{_whole_seconds(t_ns):%Y-%m-%d %H:%M:%S}.{t_ns % _NS_PER_S // _NS_PER_MS:03d} UTC"


def parse_moment(text: str, param: str) -> int:
    """Return a moment as Unix nanoseconds: ISO 8601, a day or more exact; without an offset it is UTC.

    Raises `RequestError` that names `param` and shows how to write one.
    """
    stripped = text.strip()
    # In a query a plus sign stands for a space: `...+02:00` arrives as `... 02:00`.
    stripped = re.sub(r"(T[\d:.]+) (\d\d:?\d\d)$", r"\1+\2", stripped)
    without_zone, num_zones = _ZONE.subn("", stripped)
    try:
        moment = datetime.fromisoformat(without_zone)
        has_two_zones = moment.tzinfo is not None and num_zones > 0
        moment = moment.replace(tzinfo=moment.tzinfo or UTC).astimezone(UTC)
    except (ValueError, OverflowError):
        raise _refuse(text, param, f"is no date and time; write one like {EXAMPLE}") from None
    if has_two_zones:
        raise _refuse(text, param, f"has two time zones; write it like {EXAMPLE}")
    if not _FIRST_YEAR <= moment.year <= _LAST_YEAR:
        raise _refuse(text, param, f"must be between the years {_FIRST_YEAR} and {_LAST_YEAR}")
    since = moment - datetime(_FIRST_YEAR, 1, 1, tzinfo=UTC)
    seconds = since.days * 86_400 + since.seconds
    return (seconds * _US_PER_S + since.microseconds) * _NS_PER_US


def _whole_seconds(t_ns: int) -> datetime:
    return datetime.fromtimestamp(t_ns // _NS_PER_S, UTC)


def _refuse(text: str, param: str, what: str) -> RequestError:
    shown = text if len(text) <= 40 else f"{text[:40]}\u2026"
    return RequestError(f"{param}: {shown!r} {what}.", param=param, code="invalid_moment")
