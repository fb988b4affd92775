"""Where the files that are not Python lie: in the wheel, in an editable install and in a checkout."""

from pathlib import Path
from typing import Literal

ResourceName = Literal["templates", "static", "migrations"]

_PACKAGE = Path(__file__).resolve().parent


def resource_dir(name: ResourceName) -> Path:
    """Return the absolute folder of one kind of resource.

    A wheel carries the folder as `app/_resources/<name>`; a checkout (also one installed as editable)
    has it beside the package. Raises `FileNotFoundError` if the installation is incomplete.
    """
    for candidate in (_PACKAGE / "_resources" / name, _PACKAGE.parent / name):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"The folder {name!r} is missing from this installation; install it again.")


def data_file(name: str) -> Path:
    """Return the path of a file that is shipped in `app/data`."""
    return _PACKAGE / "data" / name
