"""`pageglass db` and `pageglass sessions` on files as servers leave them."""

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from sqlalchemy import create_engine, insert, pool

from app.cli import main
from app.commands.preparation import lock_data_dir
from app.db.database import DATABASE_FILE
from app.db.migrate import OLDEST, downgrade_now, newest_revision, read_revision, upgrade_now
from app.db.models import SessionRow
from tests.support.history import lock_held, session_values

ROOT = Path(__file__).resolve().parents[3]
HOUR_NS = 3600 * 10**9


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, [*arguments], prog_name="pageglass")


def add_session(path: Path, name: str, **values: Any) -> None:
    engine = create_engine(f"sqlite:///{path}", poolclass=pool.NullPool)
    with engine.begin() as connection:
        connection.execute(insert(SessionRow), [session_values(name, **values)])
    engine.dispose()


def test_upgrade_creates_the_file_and_says_when_it_is_up_to_date(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    first = run("db", "upgrade", "--data-dir", str(folder))
    second = run("db", "upgrade", "--data-dir", str(folder))

    assert (first.exit_code, second.exit_code) == (0, 0)
    assert first.output == f"{folder / DATABASE_FILE}: upgraded to {newest_revision()}\n"
    assert "up to date" in second.output


def test_upgrade_leaves_a_served_folder_alone(tmp_path: Path) -> None:
    with lock_data_dir(tmp_path):
        result = run("db", "upgrade", "--data-dir", str(tmp_path))

    assert result.exit_code == 2
    assert "in use by another server" in result.stderr
    assert not (tmp_path / DATABASE_FILE).exists()


def test_upgrades_at_once_wait_for_each_other(tmp_path: Path) -> None:
    folder = tmp_path / "100% new?"
    command = [sys.executable, "-m", "app", "db", "upgrade", "--data-dir", str(folder)]
    processes = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=60) for process in processes]

    assert [error for _, error in outputs] == ["", "", ""]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert all(newest_revision() in output for output, _ in outputs)
    assert read_revision(folder / DATABASE_FILE) == newest_revision()


def test_upgrade_brings_an_old_file_up_to_date(tmp_path: Path) -> None:
    path = tmp_path / DATABASE_FILE
    upgrade_now(path)
    downgrade_now(path, OLDEST)

    assert run("sessions", "list", "--data-dir", str(tmp_path)).stderr.endswith("run: pageglass db upgrade\n")
    assert run("db", "upgrade", "--data-dir", str(tmp_path)).exit_code == 0
    assert read_revision(path) == newest_revision()


def test_a_damaged_file_is_one_line_of_error(tmp_path: Path) -> None:
    (tmp_path / DATABASE_FILE).write_text("no database")

    for command in (("db", "upgrade"), ("sessions", "list")):
        result = run(*command, "--data-dir", str(tmp_path))
        assert result.exit_code == 2
        assert "is damaged" in result.stderr
        assert result.stderr.count("\n") == 1


def test_a_file_of_a_newer_version_is_named_and_not_touched(tmp_path: Path) -> None:
    path = tmp_path / DATABASE_FILE
    upgrade_now(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'later'")
        connection.commit()

    result = run("db", "upgrade", "--data-dir", str(tmp_path))
    assert result.exit_code == 2
    assert "made by another version" in result.stderr
    assert read_revision(path) == "later"


def test_list_shows_sessions_newest_first_in_utc(tmp_path: Path) -> None:
    path = tmp_path / DATABASE_FILE
    upgrade_now(path)
    add_session(path, "old", started_ns=HOUR_NS, ended_ns=2 * HOUR_NS, ended_how="stopped", last_step=12345)
    add_session(
        path,
        "new",
        started_ns=3 * HOUR_NS,
        note="look\x1b[31m\nhere",
        is_starred=True,
        records_text=False,
    )

    lines = run("sessions", "list", "--data-dir", str(tmp_path)).output.splitlines()
    assert [line.split()[0] for line in lines] == ["id", "new", "old"]
    assert "1970-01-01 03:00:00 UTC  interrupted" in lines[1]
    assert lines[1].endswith("not kept  m  * look [31m here")
    assert "1970-01-01 01:00:00 UTC  stopped" in lines[2]
    assert "12,345" in lines[2]
    assert lines[2].endswith("  kept      m")


def test_list_tells_a_running_session_from_one_that_died_and_reads_a_locked_file(tmp_path: Path) -> None:
    path = tmp_path / DATABASE_FILE
    upgrade_now(path)
    add_session(path, "s")

    with lock_data_dir(tmp_path), lock_held(path):
        result = run("sessions", "list", "--data-dir", str(tmp_path), "--limit", "1")
    assert "  running  " in result.output


def test_list_refuses_a_limit_that_is_no_count(tmp_path: Path) -> None:
    upgrade_now(tmp_path / DATABASE_FILE)

    for limit in ("0", "9" * 23):
        result = run("sessions", "list", "--data-dir", str(tmp_path), "--limit", limit)
        assert result.exit_code == 2
        assert "--limit" in result.output


def test_list_without_a_history_says_where_it_would_be(tmp_path: Path) -> None:
    result = run("sessions", "list", "--data-dir", str(tmp_path))

    assert result.exit_code == 0
    assert str(tmp_path) in result.output
    assert not (tmp_path / DATABASE_FILE).exists()


def test_a_wrong_data_dir_names_the_flag() -> None:
    result = run("sessions", "list", "--data-dir", "")

    assert (result.exit_code, result.stderr[:22]) == (2, "pageglass: --data-dir:")
