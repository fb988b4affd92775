import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, insert, pool

from app.db import migrate
from app.db.database import check_integrity
from app.db.faults import FileFaultError
from app.db.migrate import NEWEST, OLDEST, downgrade_now, newest_revision, read_revision, upgrade_now
from app.db.models import Base
from app.resources import resource_dir
from tests.support.history import fetch, value_for

ROOT = Path(__file__).resolve().parents[4]
TABLES = "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"

BROKEN_REVISION = """
from alembic import op

revision = "ffffffffffff"
down_revision = "{head}"
branch_labels = None
depends_on = None

def upgrade() -> None:
    op.execute("DELETE FROM sessions")
    op.execute("CREATE TABLE half_done (id INTEGER)")
    raise RuntimeError("interrupted here")
"""


def fill_every_table(path: Path) -> None:
    """Insert one row into each table, so that each foreign key finds its row."""
    engine = create_engine(f"sqlite:///{path}", poolclass=pool.NullPool)
    with engine.begin() as connection:
        connection.exec_driver_sql("PRAGMA foreign_keys = ON")
        for table in Base.metadata.sorted_tables:
            connection.execute(insert(table), [{column.name: value_for(column) for column in table.columns}])
    engine.dispose()


def rows_of(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    return {table: fetch(path, f"SELECT * FROM {table}") for (table,) in fetch(path, TABLES)}  # noqa: S608


def test_upgrade_makes_the_tables_of_the_models(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "history.db"
    upgrade_now(path)

    tables = {name for (name,) in fetch(path, TABLES)}
    assert tables == {*Base.metadata.tables, "alembic_version"}
    assert fetch(path, "PRAGMA journal_mode") == [("wal",)]
    assert fetch(path, "PRAGMA auto_vacuum") == [(2,)]  # incremental
    assert read_revision(path) == newest_revision()


def test_autogenerate_finds_no_difference_between_models_and_migrations(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    upgrade_now(path)
    engine = create_engine(f"sqlite:///{path}", poolclass=pool.NullPool)

    with engine.connect() as connection:
        options = {"compare_type": True, "compare_server_default": True}
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, Base.metadata) == []


def test_up_down_and_up_again_with_rows_in_every_table(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    upgrade_now(path)
    fill_every_table(path)
    before = rows_of(path)

    upgrade_now(path)
    assert rows_of(path) == before
    downgrade_now(path, OLDEST)
    assert set(rows_of(path)) == {"alembic_version"}
    upgrade_now(path)

    assert set(rows_of(path)) == set(before)
    fill_every_table(path)
    assert check_integrity(path) == "ok"


def test_every_step_between_revisions_goes_both_ways_with_rows(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    upgrade_now(path)
    fill_every_table(path)

    while read_revision(path) is not None:
        downgrade_now(path, "-1")
        assert check_integrity(path) == "ok"
    while read_revision(path) != newest_revision():
        upgrade_now(path, "+1")
    fill_every_table(path)
    assert check_integrity(path) == "ok"


def test_two_processes_may_upgrade_at_once(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    program = "import sys; from pathlib import Path; from app.db.migrate import upgrade_now\n"
    program += "upgrade_now(Path(sys.argv[1]))"
    processes = [
        subprocess.Popen([sys.executable, "-c", program, str(path)], cwd=ROOT, stderr=subprocess.PIPE)
        for _ in range(2)
    ]

    assert [process.communicate(timeout=60)[1] for process in processes] == [b"", b""]
    assert [process.returncode for process in processes] == [0, 0]
    assert read_revision(path) == newest_revision()
    assert check_integrity(path) == "ok"


def test_a_process_that_never_ends_its_upgrade_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrate, "LOCK_TIMEOUT_S", 0.0)
    path = tmp_path / "history.db"

    with migrate._lock(path), pytest.raises(FileFaultError, match="Another process") as caught:
        upgrade_now(path)
    assert not caught.value.is_final


def test_a_migration_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "history.db"
    upgrade_now(path)
    fill_every_table(path)
    before = rows_of(path)
    scripts = tmp_path / "migrations"
    shutil.copytree(resource_dir("migrations"), scripts)
    (scripts / "versions" / "broken.py").write_text(BROKEN_REVISION.format(head=newest_revision()))
    monkeypatch.setattr(migrate, "resource_dir", lambda _: scripts)

    with pytest.raises(RuntimeError, match="interrupted here"):
        upgrade_now(path, NEWEST)
    assert rows_of(path) == before


def test_a_file_of_a_newer_version_is_refused_by_name_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    upgrade_now(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'fromthefuture'")
        connection.commit()

    with pytest.raises(FileFaultError, match=r"made by another version.*fromthefuture") as caught:
        upgrade_now(path)
    assert caught.value.is_final
    assert read_revision(path) == "fromthefuture"


def test_seconds_of_before_have_their_last_numbers_as_the_most_at_once(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    upgrade_now(path)
    fill_every_table(path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE metrics SET num_running = 5, num_waiting = 7, max_running = 9")
    downgrade_now(path, "b00ccb5b2ec0")
    upgrade_now(path)
    assert fetch(path, "SELECT max_running, max_waiting FROM metrics") == [(5, 7)]


def test_requests_of_before_there_were_priorities_have_none(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    upgrade_now(path)
    fill_every_table(path)
    downgrade_now(path, "9c2e51f7a6d4")
    upgrade_now(path)
    assert fetch(path, "SELECT id, priority FROM requests") == [("same", 0)]
    assert fetch(path, "SELECT request_id FROM request_texts") == [("same",)], "nothing went with it"
