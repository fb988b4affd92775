"""A recorded session without a server: records go through the recorder into a real file."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Executable

from app.db.database import DATABASE_FILE, Database
from app.db.writer import HistoryWriter
from app.history.recorder import Recorder, TextSwitch
from app.history.step_log import StepLog
from app.services.sessions import SessionReader
from engine.config import EngineConfig
from engine.records import StepRecord
from engine.snapshot import EngineSnapshot
from tests.builders import random_run
from tests.support.history import execute


class Recording:
    """One session being recorded; `states` are the states after each step as they were seen live."""

    def __init__(
        self, database: Database, session_id: str, config: EngineConfig, *, records_text: bool = True
    ) -> None:
        self.database = database
        self.session_id = session_id
        self.writer = HistoryWriter(database, flush_s=0)
        self.recorder = Recorder(session_id, self.writer, TextSwitch(is_on=records_text))
        self.log = StepLog(session_id, self.writer, self.recorder.text, delay_s=0.001)
        self.recorder.add_part(self.log)
        self.reader = SessionReader(database)
        self.snapshot = EngineSnapshot(config)
        self.states: dict[int, Any] = {0: self._describe()}

    async def feed(self, records: Iterable[StepRecord]) -> None:
        """Record these, and wait until they are written."""
        for record in records:
            self.take(record)
        await self.settle()

    def take(self, record: StepRecord) -> None:
        """Record one, as the hub does."""
        self.snapshot.apply(record)
        self.recorder.on_record(record, self.snapshot)
        self.states[record.step] = self._describe()

    async def settle(self) -> None:
        """Wait until everything is written, compact rows included."""
        self.log.flush()
        while self.log._tasks:
            await asyncio.gather(*self.log._tasks)
        await self.writer.settle()

    async def execute(self, *statements: Executable) -> None:
        """Change the file behind the recorder's back."""
        await execute(self.database, *statements)

    async def state_at(self, step: int) -> Any:
        """Return what a new reader says of a step."""
        snapshot = await SessionReader(self.database).snapshot_at(self.session_id, step)
        return as_json(snapshot)

    def _describe(self) -> Any:
        return as_json(self.snapshot)


@contextlib.asynccontextmanager
async def recording(
    folder: Path, config: EngineConfig, session_id: str = "s1", **options: Any
) -> AsyncIterator[Recording]:
    """Open a file and record one session into it; leaving ends the session in order."""
    database = Database(folder / DATABASE_FILE)
    it = Recording(database, session_id, config, **options)
    it.recorder.start("fake", "0")
    it.writer.start()
    it.recorder.open(config, "fake")
    await it.writer.settle()
    try:
        yield it
    finally:
        it.recorder.close()
        await it.writer.stop(5)


def as_json(snapshot: EngineSnapshot) -> Any:
    """Return the state document without what the server adds."""
    return msgspec.json.decode(msgspec.json.encode(snapshot.to_dict()))


@lru_cache(maxsize=4)
def make_run(seed: int, num_steps: int, fail_rate: float = 0.0) -> tuple[EngineConfig, list[StepRecord]]:
    """Return the configuration and the records of a random run."""
    records = []
    config = None
    for core, result in random_run(seed, num_steps, fail_rate=fail_rate):
        config = core.config
        records.append(result.record)
    assert config is not None
    return config, records
