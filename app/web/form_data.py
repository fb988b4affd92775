"""Reading the form of a page, and what is in it; what does not come whole is the client's error."""

import asyncio
from collections.abc import Collection, Mapping
from typing import Any, Final

from litestar import Request
from litestar.datastructures import UploadFile
from litestar.exceptions import ClientException, InternalServerException

FORM_TIMEOUT_S: Final = 30.0
"""A client that takes longer to send its form is turned away."""

MAX_NAME_CHARS: Final = 40
"""An error shows so much of a name."""

MAX_NUMBER_CHARS: Final = 32
"""int() has an error of its own for thousands of digits."""


async def read_form(
    request: Request[Any, Any, Any], *, file_fields: Collection[str] = ()
) -> Mapping[str, Any]:
    """Return the fields of a form: texts, and `UploadFile`s under the names in `file_fields` alone.

    Raises `ClientException`, also for a file elsewhere. The size is bounded by the handler's
    `request_max_body_size`.
    """
    try:
        async with asyncio.timeout(FORM_TIMEOUT_S):
            form = await request.form()
    except TimeoutError:
        raise ClientException(f"The form did not arrive within {FORM_TIMEOUT_S:g} s.") from None
    except InternalServerException:  # Litestar's word for a client that left
        raise ClientException("The connection ended before the whole form had arrived.") from None
    except (ValueError, LookupError) as error:  # bytes that are no text in their charset, or no charset
        raise ClientException(f"The form is not readable: {error}.") from None
    for name, value in form.multi_items():
        if isinstance(value, UploadFile) and name not in file_fields:
            await form.close()
            raise ClientException(
                f"{name[:MAX_NAME_CHARS]!r} is a file in the form; send it as a plain field."
            )
    return form


def find_way_back(path: object, home: str) -> str:
    """Return a path of this server that a form came from; what could lead elsewhere becomes `home`."""
    is_local = isinstance(path, str) and path.startswith("/") and not path.startswith(("//", "/\\"))
    return path if is_local and isinstance(path, str) and path.isprintable() else home


def parse_whole(text: str) -> int | None:
    """Return the whole number that a text is in plain digits, None if it is none."""
    try:
        return int(text) if _is_plain(text) else None
    except ValueError:
        return None


def parse_decimal(text: str) -> float | None:
    """Return the number that a text is, in plain digits with a point, None if it is none."""
    try:
        return float(text) if _is_plain(text) else None
    except ValueError:
        return None


def format_decimal(number: float) -> str:
    """Return the shortest text that `parse_decimal` makes the same number of."""
    return repr(number).removesuffix(".0")


def _is_plain(text: str) -> bool:
    """Python also takes the digits of every script, and `1_000`."""
    return len(text) <= MAX_NUMBER_CHARS and text.isascii() and "_" not in text
