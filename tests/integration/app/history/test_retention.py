"""What retention leaves of a session is read as if nothing had happened; what it took is refused by name."""

from pathlib import Path

import pytest
from sqlalchemy import delete, insert

from app.db.models import BookmarkRow, KeyframeRow
from app.errors import NotInHistoryError
from app.history import retention as retention_module
from app.history.retention import Retention
from tests.support.recording import Recording, make_run, recording

BOOKMARKS = (5, 256, 600)


async def cut(it: Recording, session_id: str) -> None:
    """Give up steps of the only session; `session_id` is the one that counts as running."""
    retention = Retention(it.database, it.writer, session_id, 0)
    freed = await retention._give_up_some(1)
    assert freed


async def check_from(it: Recording, first_step: int) -> None:
    """Assert that the session begins with this step, and that all states are right."""
    info = await it.reader.facts("s1")
    assert info.first_step == first_step
    for step in (first_step - 1, first_step, (first_step + info.last_step) // 2, info.last_step):
        assert await it.state_at(step) == it.states[step], f"step {step}"
    for step in (0, 1, first_step - 2):
        with pytest.raises(NotInHistoryError, match=f"{first_step}"):
            await it.state_at(step)
    assert await it.reader.gaps(info) == []
    markers, _ = await it.reader.markers("s1")
    assert [marker.step for marker in markers if marker.kind == "bookmark"] == [
        step for step in BOOKMARKS if step >= first_step - 1
    ]
    records = await it.reader.records("s1", 1, info.last_step)
    assert [record.step for record in records] == list(range(first_step, info.last_step + 1))


@pytest.mark.parametrize("running", ["s1", "another"])
async def test_what_is_left_is_read_as_before(
    tmp_path: Path, running: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention_module, "KEPT_STEPS", 0)
    config, records = make_run(1, 900, 0.01)
    async with recording(tmp_path, config) as it:
        await it.feed(records[:700])
        await it.execute(
            insert(BookmarkRow).values(
                [
                    {"id": str(step), "session_id": "s1", "step": step, "note": "", "created_ns": 1}
                    for step in BOOKMARKS
                ]
            )
        )
        await cut(it, running)
        await check_from(it, 257)
        await it.feed(records[700:900])
        await check_from(it, 257)
        await cut(it, running)
        await check_from(it, 513)
        await it.execute(delete(KeyframeRow).where(KeyframeRow.is_base.is_(False)))
        await check_from(it, 513)
        frames = await it.reader.chunk_frames("s1", 513)
        assert frames.data


async def test_a_session_whose_steps_are_all_gone_is_still_listed(tmp_path: Path) -> None:
    config, records = make_run(1, 900, 0.01)
    async with recording(tmp_path, config) as it:
        await it.feed(records[:300])
        for _ in range(2):
            await cut(it, "another")

        [info] = await it.reader.list_sessions(10)
        assert (info.first_step, info.last_step) == (301, 300)
        for step in (1, 257, 300, 301):
            with pytest.raises(NotInHistoryError, match="given up for space"):
                await it.state_at(step)
        with pytest.raises(NotInHistoryError):
            await it.reader.chunk_frames("s1", 257)
        with pytest.raises(NotInHistoryError):
            await it.reader.records("s1", 1, 300)
        assert await it.reader.gaps(info) == []
