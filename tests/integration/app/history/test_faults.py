"""Whatever happens to the history's file, the engine serves, pages say what is not recorded, the log once."""

import asyncio
import logging
import random
import sqlite3
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from subprocess import CalledProcessError

import pytest

from app.db import writer as writer_module
from app.db.database import DATABASE_FILE, check_integrity
from app.history import retention as retention_module
from tests.support.api import ServedApi, served_api, until
from tests.support.fake_engine import FakeEngine
from tests.support.history import fetch, fill, lock_held, small_disk

HTML = {"accept": "text/html"}
LOCKED_S = 5.0


async def chat(api: ServedApi) -> None:
    answer = await api.client.post("/v1/chat/completions", json=api.chat_body(max_tokens=8))
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 8


async def line(api: ServedApi) -> str:
    return (await api.client.get("/recording")).text


async def settle(api: ServedApi) -> Path:
    """Wait until all is written; return the file."""
    await api.plugin.writer.settle()
    return api.plugin.database.path


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def check_complete(path: Path, num_requests: int) -> None:
    """Assert that every request and every step is there once."""
    rows = fetch(path, "SELECT status, count(*) FROM requests GROUP BY 1")
    assert rows == [("finished", num_requests)]
    [(last_step, num_lost)] = fetch(path, "SELECT last_step, num_lost_steps FROM sessions")
    steps = [
        step
        for first, count in fetch(path, "SELECT first_step, num_steps FROM chunks ORDER BY 1")
        for step in range(first, first + count)
    ]
    assert steps == list(range(1, last_step + 1))
    assert num_lost == 0


async def test_a_lock_of_five_seconds_costs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with served_api(FakeEngine(), data_dir=tmp_path) as api:
        await chat(api)
        path = await settle(api)
        num_chats = 1
        with lock_held(path):
            released_s = time.monotonic() + LOCKED_S
            has_told = False
            while time.monotonic() < released_s:
                await chat(api)
                num_chats += 1
                has_told = has_told or "Not recorded for now" in await line(api)
                assert (await api.client.get("/api/sessions")).status_code == 200  # reading goes on
                await asyncio.sleep(0.05)
            assert has_told
            assert "Another process holds a lock" in (await api.client.get("/live", headers=HTML)).text
        await chat(api)
        await settle(api)
        await until(lambda: api.plugin.writer.status.state == "recording")
        assert "Not recorded" not in await line(api)
        assert len(errors_in(caplog)) == 1
    check_complete(path, num_chats + 1)
    assert check_integrity(path) == "ok"


async def test_a_full_disk_costs_nothing_that_fits_into_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "RETRY_S", (0.05,))
    try:
        with small_disk(tmp_path / "disk", "2m") as folder:
            async with served_api(FakeEngine(), data_dir=folder) as api:
                await chat(api)
                path = await settle(api)
                filler = folder / "filler"
                fill(filler)
                num_chats = 1
                while api.plugin.writer.status.state != "failing":
                    await chat(api)
                    num_chats += 1
                await chat(api)
                assert "is full" in await line(api)
                assert "Not recorded for now" in (await api.client.get("/load", headers=HTML)).text
                filler.unlink()
                await until(lambda: api.plugin.writer.status.state == "recording")
                await chat(api)
            check_complete(path, num_chats + 2)
            assert check_integrity(path) == "ok"
    except CalledProcessError as refused:
        pytest.skip(f"no file system can be mounted here: {refused.stderr!r}")
    assert len(errors_in(caplog)) == 1


async def test_a_folder_that_becomes_read_only_is_tried_until_it_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "RETRY_S", (0.05,))
    try:
        with small_disk(tmp_path / "disk", "4m") as folder:
            remount(folder, "ro")
            async with served_api(FakeEngine(), data_dir=folder) as api:
                await until(lambda: api.plugin.writer.status.state == "failing")
                await chat(api)
                assert "cannot be" in await line(api)
                answer = await api.client.get("/api/sessions")
                assert answer.status_code == 503
                assert answer.json()["code"] == "history_unavailable"
                remount(folder, "rw")
                path = await settle(api)
            check_complete(path, 1)
    except CalledProcessError as refused:
        pytest.skip(f"no file system can be mounted here: {refused.stderr!r}")
    assert len(errors_in(caplog)) == 1


def remount(folder: Path, mode: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{mode}", str(folder)], check=True, capture_output=True)


async def test_a_damaged_file_is_left_alone_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = b"no database at all" * 1000
    (tmp_path / DATABASE_FILE).write_bytes(content)
    async with served_api(FakeEngine(), data_dir=tmp_path) as api:
        await until(lambda: api.plugin.writer.status.state == "off")
        await chat(api)
        for path in ("/live", "/sessions", "/requests", "/chat", "/load"):
            page = await api.client.get(path, headers=HTML)
            assert page.status_code in {200, 503}, path
            assert "is damaged" in page.text, path
        answer = await api.client.get("/api/sessions")
        assert answer.status_code == 503
        assert "Move it away and restart" in answer.json()["detail"]
        assert "Lost in this run" in await line(api)
    assert (tmp_path / DATABASE_FILE).read_bytes() == content
    assert len(errors_in(caplog)) == 1


async def test_a_deleted_file_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "CHECK_FILE_S", 0.01)
    async with served_api(FakeEngine(), data_dir=tmp_path) as api:
        await chat(api)
        path = await settle(api)
        for suffix in ("", "-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        await chat(api)
        await until(lambda: api.plugin.writer.status.state == "off")
        await chat(api)
        assert "was deleted or replaced" in await line(api)
        assert (await api.client.get("/api/sessions")).status_code == 503
    assert len(errors_in(caplog)) == 1


def overwrite(path: Path) -> None:
    """Leave the first page as it is, and nothing behind it."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(random.Random(1).randbytes(size - 4096))


def lose_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"X" * 4096)


def cut_off(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(0)


DAMAGES = {"all behind the first page": overwrite, "header": lose_header, "everything": cut_off}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("is_read", [True, False], ids=["with a reader", "without"])
async def test_damage_while_running_is_told_once_whoever_meets_it(
    damage: Callable[[Path], None],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_read: bool,
) -> None:
    monkeypatch.setattr(writer_module, "CHECK_FILE_S", 0.02)
    monkeypatch.setattr(retention_module, "INTERVAL_S", 0.02)
    async with served_api(FakeEngine(), data_dir=tmp_path) as api:
        for _ in range(5):
            await chat(api)
        path = await settle(api)
        with closing(sqlite3.connect(path)) as other:
            other.execute("PRAGMA wal_checkpoint(FULL)")
        damage(path)
        async with asyncio.timeout(10):
            while api.plugin.writer.status.state != "off":
                await chat(api)
                if is_read:
                    listed = await api.client.get("/api/sessions")
                    assert listed.status_code in {200, 503}
                await asyncio.sleep(0.005)
        await chat(api)
        assert "is damaged" in await line(api)
        page = await api.client.get("/sessions", headers=HTML)
        assert (page.status_code, "Move it away and restart" in page.text) == (503, True)
    assert len(errors_in(caplog)) == 1
