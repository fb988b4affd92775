"""A recorded session read from the file, without a server: its facts, and its records one by one."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Connection, create_engine, pool, select

from app.db.models import ChunkRow, RequestRow, SessionRow
from app.db.urls import file_url
from app.errors import NotInHistoryError
from app.history.record_codec import decode_records
from engine.config import EngineConfig
from engine.records import StepRecord

_MAX_SHOWN_IDS = 5


@dataclass(frozen=True, kw_only=True)
class SessionFile:
    """One session of a history file. `temperatures` by request id, where they differ from the default."""

    path: Path
    id: str
    model: str
    config: EngineConfig
    first_step: int
    last_step: int
    temperatures: dict[str, float]

    def records(self) -> Iterator[StepRecord]:
        """Yield the records that are there, in order; raises `HistoryUnavailableError` for damaged ones."""
        following = 0
        with _connect(self.path) as connection:
            while True:
                query = (
                    select(ChunkRow.records)
                    .where(
                        ChunkRow.session_id == self.id, ChunkRow.first_step + ChunkRow.num_steps > following
                    )
                    .order_by(ChunkRow.first_step)
                    .limit(1)
                )
                data = connection.scalar(query)
                if data is None:
                    return
                for record in decode_records(data):
                    if record.step >= following:
                        following = record.step + 1
                        yield record


def open_session(path: Path, name: str) -> SessionFile:
    """Return the session whose id is `name` or begins with it; raises `NotInHistoryError`."""
    with _connect(path) as connection:
        row = _find_row(connection, path, name)
        if row.config is None:
            raise NotInHistoryError(f"Session {row.id} has no steps: its model was never loaded.")
        params = select(RequestRow.id, RequestRow.params).where(RequestRow.session_id == row.id)
        temperatures = {
            request_id: float(values["temperature"])
            for request_id, text in connection.execute(params)
            if "temperature" in (values := msgspec.json.decode(text))
        }
    return SessionFile(
        path=path,
        id=row.id,
        model=row.model_name,
        config=msgspec.json.decode(row.config, type=EngineConfig),
        first_step=row.first_step,
        last_step=row.last_step,
        temperatures=temperatures,
    )


def _connect(path: Path) -> Connection:
    return create_engine(file_url(path, "ro"), poolclass=pool.NullPool).connect()


def _find_row(connection: Connection, path: Path, name: str) -> Any:
    matches = SessionRow.id.startswith(name, autoescape=True)
    query = select(SessionRow).where(matches).order_by(SessionRow.started_ns.desc()).limit(_MAX_SHOWN_IDS)
    rows = connection.execute(query).all() if name else []
    exact = [row for row in rows if row.id == name]
    if len(exact or rows) > 1:
        raise NotInHistoryError(
            f"{name!r} is the beginning of several sessions: {', '.join(r.id for r in rows)}"
        )
    if not rows:
        raise NotInHistoryError(
            f"No session {name!r} is recorded in {path}; pageglass sessions list shows all."
        )
    return (exact or rows)[0]
