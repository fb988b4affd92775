"""Records one server run: its session, and through its parts every step, request and second.

A second subscriber beside the live view. Everything here runs on the event loop, takes microseconds and
waits for nothing: what is to be kept goes into the writer's queue.
"""

import logging
import time
from collections.abc import Callable
from typing import Protocol

import msgspec
from sqlalchemy import insert, update

from app.db.models import SessionRow
from app.db.writer import HistoryWriter
from app.db.writes import Write
from engine.config import EngineConfig
from engine.engine_info import EngineInfo
from engine.records import StepRecord
from engine.snapshot import EngineSnapshot

logger = logging.getLogger(__name__)


class RecordPart(Protocol):
    """Keeps one kind of fact. Calls come on the event loop, in order."""

    def on_open(self, config: EngineConfig) -> None:
        """The engine is ready; its first record comes next."""

    def on_record(self, record: StepRecord, snapshot: EngineSnapshot) -> None:
        """One record, and the state after it, which is not to be kept: it moves on."""

    def on_close(self) -> None:
        """The server stops: whatever was held back must be put now."""


class TextSwitch:
    """Whether prompts, answers and token ids are kept; people may change it while the server runs."""

    def __init__(self, *, is_on: bool) -> None:
        """Start as the settings say."""
        self.is_on = is_on


class Recorder:
    """Feeds its parts and keeps the session's own row."""

    def __init__(
        self,
        session_id: str,
        writer: HistoryWriter,
        text: TextSwitch,
        *,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Nothing is recorded before `start`."""
        self.session_id = session_id
        self.text = text
        self._writer = writer
        self._wall_ns = wall_ns
        self._parts: list[RecordPart] = []
        self._last_step = 0
        self._has_failed = False

    def add_part(self, part: RecordPart) -> None:
        """Let a part take in what comes from now on."""
        self._parts.append(part)

    def start(self, model_name: str, version: str) -> None:
        """Begin the session; the row is there before anything that refers to it."""
        row = {
            "id": self.session_id,
            "started_ns": self._wall_ns(),
            "model_name": model_name,
            "version": version,
            "records_text": self.text.is_on,
        }
        self._writer.put(Write(insert(SessionRow), [row]))

    def open(self, config: EngineConfig, model_name: str, *, info: EngineInfo | None = None) -> None:
        """The engine is ready; `info` says how the model is run."""
        engine = msgspec.json.encode(info).decode() if info is not None else None
        self._update(config=msgspec.json.encode(config).decode(), engine=engine, model_name=model_name)
        for part in self._parts:
            part.on_open(config)

    def on_record(self, record: StepRecord, snapshot: EngineSnapshot) -> None:
        """Take one record, after the live view has folded it; raises nothing."""
        if self._has_failed:
            return
        self._last_step = record.step
        try:
            for part in self._parts:
                part.on_record(record, snapshot)
        except Exception:
            logger.exception("Recording does not add up and ends; the engine goes on")
            self._has_failed = True

    @property
    def has_failed(self) -> bool:
        """Whether recording ended because of a bug, logged when it was found."""
        return self._has_failed

    def switch_text(self, *, is_on: bool) -> None:
        """Keep texts from now on, or no longer; a session that lacked some once says so for good."""
        self.text.is_on = is_on
        if not is_on:
            self._update(records_text=False)

    def close(self) -> None:
        """End the session in order."""
        for part in self._parts:
            part.on_close()
        self._update(ended_ns=self._wall_ns(), ended_how="stopped")

    def _update(self, **values: object) -> None:
        self._writer.put(Write(update(SessionRow).where(SessionRow.id == self.session_id).values(**values)))
