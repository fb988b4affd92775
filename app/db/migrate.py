"""Bringing the database file to the newest schema, under a lock, so that two processes do not both try."""

import asyncio
import fcntl
import logging
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from app.db.faults import FileFaultError
from app.db.urls import file_uri
from app.folders import make_folder
from app.resources import resource_dir

if TYPE_CHECKING:
    from alembic.config import Config

LOCK_SUFFIX = ".upgrade-lock"
LOCK_TIMEOUT_S = 10.0
"""How long to wait for another process that upgrades the file."""

_LOCK_POLL_S = 0.05
NEWEST = "head"
OLDEST = "base"


async def upgrade(path: Path, revision: str = NEWEST) -> None:
    """Create or upgrade the file, off the event loop; raises what `upgrade_now` raises."""
    await asyncio.to_thread(upgrade_now, path, revision)


def upgrade_now(path: Path, revision: str = NEWEST) -> None:
    """Create or upgrade the file, in one transaction; waits for another process that does so.

    Raises `FileFaultError` for a file of another version, or when the other process does not end, `OSError`
    and SQLAlchemy's `DatabaseError` if the file cannot be used.
    """
    logging.getLogger("alembic").setLevel(logging.WARNING)  # it tells of its plugins, and of our transactions
    from alembic import command  # noqa: PLC0415 - takes 0.2 s; the server listens before that
    from alembic.util import CommandError  # noqa: PLC0415 - as above

    make_folder(path.parent)
    with _lock(path):
        try:
            command.upgrade(make_config(path), revision)
        except CommandError as error:
            raise FileFaultError(
                f"The history file {path} was made by another version of Pageglass ({error}). "
                "Use that version, or move the file away and restart the server.",
                is_final=True,
            ) from error


def downgrade_now(path: Path, revision: str) -> None:
    """Take the file back to an older schema, in one transaction; what only newer ones hold is lost."""
    from alembic import command  # noqa: PLC0415 - as in `upgrade_now`

    with _lock(path):
        command.downgrade(make_config(path), revision)


def read_revision(path: Path) -> str | None:
    """Return the schema's revision in an existing file, None if the file has none.

    Raises SQLAlchemy's or sqlite3's `DatabaseError` if it is no database.
    """
    with closing(sqlite3.connect(f"{file_uri(path)}?mode=ro", uri=True)) as connection:
        tables = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'alembic_version'").fetchone()
        row = connection.execute("SELECT version_num FROM alembic_version").fetchone() if tables else None
    return None if row is None else str(row[0])


def newest_revision() -> str:
    """Return the revision that this version of the program works with."""
    from alembic.script import ScriptDirectory  # noqa: PLC0415 - as in `upgrade_now`

    return str(ScriptDirectory.from_config(make_config(Path())).get_current_head())


def make_config(path: Path) -> "Config":
    """Return Alembic's configuration for the file."""
    from alembic.config import Config  # noqa: PLC0415 - as in `upgrade_now`

    config = Config()
    config.set_main_option("script_location", str(resource_dir("migrations")).replace("%", "%%"))
    config.attributes["path"] = path
    return config


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    with path.with_name(path.name + LOCK_SUFFIX).open("a") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise FileFaultError(
                        f"Another process has been upgrading the history file {path} for a long time."
                    ) from None
                time.sleep(_LOCK_POLL_S)
        yield
