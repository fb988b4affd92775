"""Making folders, with reasons that say what is wrong."""

import errno
from pathlib import Path


def make_folder(folder: Path) -> None:
    """Make a folder and those above it; the `OSError` of a failure says why in its `strerror`.

    A file system that takes no folders, such as /proc, only says that something does not exist.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        existing = next((parent for parent in folder.parents if parent.exists()), folder)
        if error.errno == errno.ENOENT:
            raise OSError(error.errno, f"{existing} takes no new folders", str(folder)) from error
        raise
