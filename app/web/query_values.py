"""Values of a query or a path, checked: an error names the parameter and what it may be."""

from typing import Any

from litestar import Request

from engine.errors import RequestError

MAX_INTEGER = 2**53 - 1
"""What every JSON reader can hold."""

_MAX_SHOWN = 40
_FLAGS = {"1": True, "true": True, "0": False, "false": False}


def read_int(
    request: Request[Any, Any, Any], name: str, default: int, low: int = 0, high: int = MAX_INTEGER
) -> int:
    """Return a whole number of the query; raises `RequestError`."""
    text = request.query_params.get(name)
    return default if text is None else parse_int(text, name, low, high)


def read_flag(request: Request[Any, Any, Any], name: str, *, default: bool) -> bool:
    """Return a flag of the query, given as 1, 0, true or false; raises `RequestError`."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if text.lower() not in _FLAGS:
        raise RequestError(f"{name} is {_show(text)}; allowed: 1, 0, true, false.", param=name)
    return _FLAGS[text.lower()]


def parse_int(text: str, name: str, low: int = 0, high: int = MAX_INTEGER) -> int:
    """Return a whole number from text; raises `RequestError` naming the parameter `name`."""
    digits = text.removeprefix("-")
    if digits.isascii() and digits.isdigit() and len(digits) <= len(str(MAX_INTEGER)):
        value = int(text)
        if low <= value <= high:
            return value
    raise RequestError(f"{name} is {_show(text)}; allowed: a whole number, {low} to {high}.", param=name)


def _show(text: str) -> str:
    return repr(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…")
