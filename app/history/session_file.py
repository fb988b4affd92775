"""A recorded session read from the file, without a server: its facts, and its records one by one."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Connection, create_engine, pool, select

from app.db.models import ChunkRow, RequestRow, SessionRow
from app.db.urls import file_url
from app.errors import HistoryUnavailableError, NotInHistoryError
from app.history.record_codec import decode_records
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.records import StepRecord

_MAX_SHOWN_IDS = 5

_FIRST_SETTINGS = (
    "block_size",
    "num_blocks",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "max_waiting",
    "enable_prefix_caching",
    "watermark",
    "policy",
    "preemption",
)
"""Settings that sessions of every version have."""


class _Params(msgspec.Struct):
    """What is needed of the parameters of a request."""

    temperature: float | None = None


@dataclass(frozen=True, kw_only=True)
class SessionFile:
    """One session of a history file. `temperatures` by request id, where they differ from the default.

    `missing` names settings that are not recorded, since there were none in its version: they have defaults.
    """

    path: Path
    id: str
    model: str
    config: EngineConfig
    missing: tuple[str, ...]
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
    """Return the session whose id is `name` or begins with it.

    Raises `NotInHistoryError`, and `HistoryUnavailableError` for what is damaged.
    """
    with _connect(path) as connection:
        row = _find_row(connection, path, name)
        if row.config is None:
            raise NotInHistoryError(f"Session {row.id} has no steps: its model was never loaded.")
        config, missing = _read_config(row)
        temperatures = _read_temperatures(connection, row.id)
    return SessionFile(
        path=path,
        id=row.id,
        model=row.model_name,
        config=config,
        missing=missing,
        first_step=row.first_step,
        last_step=row.last_step,
        temperatures=temperatures,
    )


def _read_config(row: Any) -> tuple[EngineConfig, tuple[str, ...]]:
    """Return the settings of a session, and the names of those that are not recorded."""
    try:
        recorded = msgspec.json.decode(row.config, type=dict[str, Any])
        _check_names(recorded)
        config = msgspec.convert(recorded, EngineConfig)
        config.validate()
    except (msgspec.MsgspecError, RecursionError, TypeError, ValueError, ConfigError) as error:
        raise HistoryUnavailableError(
            f"The settings of session {row.id} are not readable: {_as_sentence(error)}"
        ) from error
    return config, tuple(name for name in EngineConfig.__struct_fields__ if name not in recorded)


def _check_names(recorded: dict[str, Any]) -> None:
    if missing := [name for name in _FIRST_SETTINGS if name not in recorded]:
        raise ConfigError(f"missing are {', '.join(missing)}.")


def _read_temperatures(connection: Connection, session_id: str) -> dict[str, float]:
    query = select(RequestRow.id, RequestRow.params).where(RequestRow.session_id == session_id)
    temperatures = {}
    for request_id, text in connection.execute(query):
        try:
            params = msgspec.json.decode(text, type=_Params)
        except (msgspec.MsgspecError, RecursionError, TypeError, ValueError) as error:
            raise HistoryUnavailableError(
                f"The parameters of request {request_id} of session {session_id} are not readable: "
                f"{_as_sentence(error)}"
            ) from error
        if params.temperature is not None:
            temperatures[request_id] = params.temperature
    return temperatures


def _as_sentence(error: Exception) -> str:
    return f"{str(error).rstrip('.')}."


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
