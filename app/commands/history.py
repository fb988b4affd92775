"""`pageglass db` and `pageglass sessions`: the history without a server."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from sqlalchemy import create_engine, func, pool, select

from app.commands.options import WholeNumber, data_dir_option
from app.commands.preparation import is_in_use, share_data_dir
from app.db.database import DATABASE_FILE
from app.db.faults import find_file_fault
from app.db.migrate import newest_revision, read_revision, upgrade_now
from app.db.models import RequestRow, SessionRow
from app.db.urls import file_url
from app.settings import Settings, check_environment
from app.web.moments import to_words
from engine.errors import ConfigError


@click.group()
def db() -> None:
    """Look after the history file."""


@click.group()
def sessions() -> None:
    """Look at recorded sessions."""


@db.command()
@data_dir_option
def upgrade(data_dir: Path | None) -> None:
    """Bring the history file to the schema of this version, or create it; `serve` does so by itself.

    What is in it stays. Nothing is changed if that fails, or if a server uses the folder.
    """
    path = find_history_file(data_dir)
    with explain_file_faults(path):
        if path.exists() and read_revision(path) == newest_revision():
            click.echo(f"{path}: up to date ({newest_revision()})")
            return
        with share_data_dir(path.parent):
            upgrade_now(path)
        click.echo(f"{path}: upgraded to {newest_revision()}")


@sessions.command("list")
@click.option("--limit", type=WholeNumber(min=1), metavar="N", default=50, help="Newest N.  [default: 50]")
@data_dir_option
def list_(limit: int, data_dir: Path | None) -> None:
    """Show recorded sessions, newest first.

    A star marks those that are kept whatever the size of the history; "texts" says whether prompts, answers
    and token ids were kept all the time.
    """
    path = find_history_file(data_dir)
    if not path.exists():
        click.echo(f"No sessions in {path.parent}. Each run of pageglass serve records one.")
        return
    with explain_file_faults(path):
        check_revision(path)
        rows = _read_sessions(path, limit, is_served=is_in_use(path.parent))
    head = ("id", "started", "status", "steps", "requests", "texts", "model", "note")
    for row in [head, *rows] if rows else []:
        session_id, started, status, steps, requests, texts, model, note = row
        facts = f"{session_id:32}  {started:23}  {status:11}  {steps:>11}  {requests:>8}  {texts:8}"
        click.echo(f"{facts}  {model}  {note}".rstrip())
    if not rows:
        click.echo(f"No sessions in {path}. Each run of pageglass serve records one.")


def find_history_file(data_dir: Path | None) -> Path:
    """Return where the history is, by default where a server would keep it."""
    check_environment(os.environ)
    return (data_dir or Settings().data_dir) / DATABASE_FILE


def check_revision(path: Path) -> None:
    """Raise `ConfigError` unless the file has the schema of this version."""
    revision = read_revision(path)
    if revision != newest_revision():
        raise ConfigError(
            f"{path} has the schema {revision or 'of no version'}, expected is {newest_revision()}; "
            "run: pageglass db upgrade"
        )


@contextmanager
def explain_file_faults(path: Path) -> Iterator[None]:
    """Turn what SQLite says of the file into an error for people."""
    try:
        yield
    except Exception as error:
        fault = find_file_fault(path, error)
        if fault is None:
            raise
        raise fault from error


def _read_sessions(path: Path, limit: int, *, is_served: bool) -> list[tuple[str, ...]]:
    num_requests = select(func.count()).where(RequestRow.session_id == SessionRow.id).scalar_subquery()
    query = select(SessionRow, num_requests).order_by(SessionRow.started_ns.desc(), SessionRow.id)
    engine = create_engine(file_url(path, "ro"), poolclass=pool.NullPool)
    with engine.connect() as connection:
        rows = connection.execute(query.limit(limit)).all()
    engine.dispose()
    # A session without an end is that of the server that runs, or of one that died.
    open_status = "running" if is_served else "interrupted"
    return [
        (
            row.id,
            to_words(row.started_ns),
            row.ended_how or open_status,
            f"{row.last_step:,}",
            f"{row[-1]:,}",
            "kept" if row.records_text else "not kept",
            _one_line(row.model_name),
            _one_line(f"* {row.note}" if row.is_starred else row.note),
        )
        for row in rows
    ]


def _one_line(text: str) -> str:
    """Return a text without what a terminal would obey."""
    return "".join(character if character.isprintable() else " " for character in text)
