"""What requests may give as their priority: a number, or the name of a class."""

from collections.abc import Iterable

from app.setting_values import PriorityClass
from engine.config import MAX_PRIORITY
from engine.errors import RequestError

MAX_SHOWN_CHARS = 40


class Priorities:
    """The classes of one server."""

    def __init__(self, classes: Iterable[PriorityClass]) -> None:
        """Know these by their names."""
        self._numbers = dict(classes)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the classes, the most urgent first."""
        return tuple(sorted(self._numbers, key=lambda name: (self._numbers[name], name)))

    def find(self, asked: int | str | None) -> int:
        """Return the priority of a request, 0 if it asks for none.

        Raises `RequestError` for a number out of range and for a name that is not known, with the known ones.
        """
        if asked is None:
            return 0
        if isinstance(asked, int):
            if abs(asked) > MAX_PRIORITY:
                raise _refuse(str(asked), self)
            return asked
        if asked not in self._numbers:
            raise _refuse(repr(asked), self)
        return self._numbers[asked]

    def describe(self) -> dict[str, int]:
        """Return number by name, the most urgent first."""
        return {name: self._numbers[name] for name in self.names}


def _refuse(shown: str, priorities: Priorities) -> RequestError:
    if len(shown) > MAX_SHOWN_CHARS:
        shown = f"{shown[:MAX_SHOWN_CHARS]}\u2026"
    return RequestError(
        f"priority is {shown}; allowed: whole numbers from -{MAX_PRIORITY} to {MAX_PRIORITY}, lower ones are "
        f"more urgent, and the names {', '.join(priorities.names)}.",
        param="priority",
        code="invalid_value",
    )
