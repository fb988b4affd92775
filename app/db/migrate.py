"""Bringing the database file to the newest schema, under a lock, so that two processes do not both try."""

import asyncio
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from app.errors import HistoryUnavailableError
from app.folders import make_folder
from app.resources import resource_dir

if TYPE_CHECKING:
    from alembic.config import Config

LOCK_SUFFIX = ".upgrade-lock"


async def upgrade(path: Path, revision: str = "head") -> None:
    """Create or upgrade the file, off the event loop; raises `OSError` or SQLAlchemy's `DatabaseError`."""
    await asyncio.to_thread(upgrade_now, path, revision)


def upgrade_now(path: Path, revision: str = "head") -> None:
    """Create or upgrade the file; waits for another process that does so."""
    from alembic import command  # noqa: PLC0415 - takes 0.2 s; the server listens before that
    from alembic.util import CommandError  # noqa: PLC0415 - as above

    make_folder(path.parent)
    with _lock(path):
        try:
            command.upgrade(make_config(path), revision)
        except CommandError as error:
            raise HistoryUnavailableError(
                f"The history file {path} was made by another version ({error}); "
                "use that version, or move the file away."
            ) from error


def make_config(path: Path) -> "Config":
    """Return Alembic's configuration for the file."""
    from alembic.config import Config  # noqa: PLC0415 - as in `upgrade_now`

    config = Config()
    config.set_main_option("script_location", str(resource_dir("migrations")).replace("%", "%%"))
    config.attributes["path"] = path
    return config


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.with_name(path.name + LOCK_SUFFIX).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
