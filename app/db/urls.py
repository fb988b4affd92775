"""How the history file is named to SQLite, whatever characters its folder's name has."""

import os
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import URL

DRIVER = "sqlite"
ASYNC_DRIVER = "sqlite+aiosqlite"


def file_uri(path: Path) -> str:
    """Return the address of a file as SQLite reads it, without parameters."""
    return f"file:{quote(os.fsencode(path))}"


def file_url(path: Path, mode: str, driver: str = DRIVER) -> URL:
    """Return SQLAlchemy's address of a file; `mode`: ro, rw, or rwc, which makes the file."""
    return URL.create(driver, database=file_uri(path), query={"mode": mode, "uri": "true"})
