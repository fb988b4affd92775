"""Rows of requests that the writer had no room for get into the file once there is some; none stays open."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from app.db import writer as writer_module
from app.db.models import RequestRow
from app.db.writer import HistoryWriter
from app.history import lost_requests
from tests.support.api import ServedApi, served_api, until
from tests.support.fake_engine import FakeEngine
from tests.support.history import execute, fetch

ROWS = "SELECT id, status, finish_reason, num_output_tokens FROM requests"


async def complete(api: ServedApi, **fields: Any) -> Any:
    body = {"model": "fake", "prompt": "hello", "max_tokens": 8, **fields}
    return (await api.client.post("/v1/completions", json=body)).json()


def sequences(api: ServedApi) -> list[int]:
    """Return the sequences that the engine has."""
    snapshot = api.plugin.hub.snapshot
    return [] if snapshot is None else list(snapshot.sequences)


@pytest.mark.parametrize("lost", ["arrival and all", "end"])
async def test_a_lost_row_is_put_again_as_it_is_then(
    lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_requests, "RETRY_S", 0.01)
    async with served_api(FakeEngine(), data_dir=tmp_path) as api:
        path = api.plugin.database.path
        await complete(api)
        await api.plugin.writer.settle()
        api.engine.runner.gate.clear()
        task = asyncio.create_task(complete(api, max_tokens=40, stop=["never"]))
        if lost == "end":
            api.engine.runner.step_s = 0.01
            api.engine.runner.gate.set()
            await until(lambda: len(sequences(api)) == 1)
            api.engine.runner.gate.clear()
            await api.plugin.writer.settle()
        with monkeypatch.context() as patch:
            patch.setattr(writer_module, "MAX_QUEUED_PUTS", 0)
            api.engine.runner.gate.set()
            answer = await task
            await until(lambda: not sequences(api))
        await until(lambda: dict(rows(path)).get(answer["id"]) == ("finished", "length", 40))

    assert len(rows(path)) == 2


def rows(path: Path) -> list[tuple[str, tuple[Any, ...]]]:
    return [(row[0], row[1:]) for row in fetch(path, ROWS)]


async def test_what_the_client_got_counts_though_it_was_told_without_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_requests, "RETRY_S", 0.01)
    async with served_api(FakeEngine(), data_dir=tmp_path) as api:
        whole = (await complete(api, max_tokens=12, temperature=0))["choices"][0]["text"]
        await api.plugin.writer.settle()
        with monkeypatch.context() as patch:
            patch.setattr(writer_module, "MAX_QUEUED_PUTS", 0)
            stopped = await complete(api, max_tokens=12, temperature=0, stop=[whole[3:5]])
            await until(lambda: not sequences(api))
        told = ("finished", "stop", stopped["usage"]["completion_tokens"])
        await until(lambda: dict(rows(api.plugin.database.path)).get(stopped["id"]) == told)


async def test_after_an_orderly_stop_nothing_is_open_and_the_next_start_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lost_requests, "MAX_LOST", 1)
    async with served_api(FakeEngine(), data_dir=tmp_path) as api:
        path = api.plugin.database.path
        api.engine.runner.step_s = 0.005
        tasks = [asyncio.create_task(complete(api, max_tokens=60)) for _ in range(4)]
        await until(lambda: len(sequences(api)) == 4)
        api.engine.runner.gate.clear()
        await api.plugin.writer.settle()
        assert len(rows(path)) == 4
        with monkeypatch.context() as patch:
            patch.setattr(writer_module, "MAX_QUEUED_PUTS", 0)
            api.engine.runner.gate.set()
            await asyncio.gather(*tasks)
            await until(lambda: not sequences(api))
    statuses = [status for _, (status, *_) in rows(path)]
    assert sorted(statuses) == ["finished", "interrupted", "interrupted", "interrupted"]
    assert fetch(path, "SELECT count(*) FROM requests WHERE ended_ns IS NULL OR ended_step IS NULL") == [(0,)]
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        async with served_api(FakeEngine(), data_dir=tmp_path) as api:
            await api.plugin.writer.settle()
    assert "did not end in order" not in caplog.text


async def test_a_row_that_is_refused_is_not_put_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_requests, "RETRY_S", 0.001)
    num_refused = 0
    write = HistoryWriter._refuse

    def count(self: HistoryWriter, batch: Any, error: Exception) -> None:
        nonlocal num_refused
        num_refused += len(batch) == 1
        write(self, batch, error)

    monkeypatch.setattr(HistoryWriter, "_refuse", count)
    async with served_api(FakeEngine(), data_dir=tmp_path) as api:
        await api.plugin.writer.settle()
        trigger = f"CREATE TRIGGER no BEFORE INSERT ON {RequestRow.__tablename__} "
        await execute(api.plugin.database, text(trigger + "BEGIN SELECT RAISE(ABORT, 'no'); END"))
        await complete(api)
        for _ in range(10):
            await asyncio.sleep(0.01)
            await api.plugin.writer.settle()
    assert 1 <= num_refused <= 3
