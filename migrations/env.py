"""Runs migrations on one database file; `app.db.migrate` says which."""

from typing import Any

from alembic import context
from sqlalchemy import create_engine, event, pool

from app.db.models import Base
from app.db.urls import file_url

BUSY_MS = 5000


def run() -> None:
    """Run what Alembic asks for in one transaction: a migration that fails leaves the file as it was."""
    path = context.config.attributes["path"]
    engine = create_engine(
        file_url(path, "rwc"), poolclass=pool.NullPool, connect_args={"isolation_level": None}
    )

    @event.listens_for(engine, "connect")
    def _on_connect(connection: Any, _: object) -> None:
        connection.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # only a file without tables takes it
        connection.execute("PRAGMA journal_mode = WAL")

    @event.listens_for(engine, "begin")
    def _on_begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    with engine.connect() as connection:
        context.configure(
            connection=connection,
            target_metadata=Base.metadata,
            render_as_batch=True,
            compare_type=True,
            compare_server_default=True,
        )
        with connection.begin():
            context.run_migrations()
    engine.dispose()


run()
