"""Reading the form of a page; what does not come whole, or is no form, is the client's error."""

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from litestar import Request
from litestar.exceptions import ClientException, InternalServerException

FORM_TIMEOUT_S: Final = 30.0
"""A client that takes longer to send its form is turned away."""


async def read_form(request: Request[Any, Any, Any]) -> Mapping[str, Any]:
    """Return the fields of a form: texts and `UploadFile`s; raises `ClientException`.

    The size is bounded by the handler's `request_max_body_size`.
    """
    try:
        async with asyncio.timeout(FORM_TIMEOUT_S):
            return await request.form()
    except TimeoutError:
        raise ClientException(f"The form did not arrive within {FORM_TIMEOUT_S:g} s.") from None
    except InternalServerException:  # Litestar's word for a client that left
        raise ClientException("The connection ended before the whole form had arrived.") from None
    except (ValueError, LookupError) as error:  # bytes that are no text in their charset, or no charset
        raise ClientException(f"The form is not readable: {error}.") from None
