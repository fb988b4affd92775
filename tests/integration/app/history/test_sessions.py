"""Recorded steps come back from the file as the states that were seen live."""

import random
from pathlib import Path

import pytest
from sqlalchemy import delete, func, select

from app.db.models import ChunkRow, KeyframeRow, MetricRow
from app.errors import HistoryUnavailableError, NotInHistoryError
from app.history.metric_log import MetricLog
from app.services.sessions import SessionReader
from tests.support.recording import Recording, as_json, make_run, recording


async def count_rows(it: Recording, *columns: object) -> tuple[int, ...]:
    async with it.database.read() as db:
        return tuple((await db.execute(select(*columns))).one())  # type: ignore[call-overload]


async def test_any_state_comes_back_and_deleted_keyframes_change_nothing(tmp_path: Path) -> None:
    config, records = make_run(1, 700, 0.01)
    async with recording(tmp_path, config) as it:
        await it.feed(records)
        assert await count_rows(it, func.count(), func.sum(ChunkRow.num_steps)) == (3, 700)
        steps = [0, 1, 255, 256, 257, 512, 513, 700, *random.Random(1).sample(range(701), 30)]
        for step in steps:
            assert await it.state_at(step) == it.states[step], f"step {step}"
        await it.execute(delete(KeyframeRow))
        for step in steps:
            assert await it.state_at(step) == it.states[step], f"step {step}"
        assert as_json(await it.reader.snapshot_at("s1")) == it.states[700]
    totals = it.states[700]["totals"]
    assert min(totals[f"num_{what}"] for what in ("preemptions", "hit_tokens", "evictions", "resets")) > 0


async def test_who_reads_finds_every_step_and_second_until_now(tmp_path: Path) -> None:
    config, records = make_run(1, 700, 0.01)
    async with recording(tmp_path, config) as it:
        it.log._delay_s = 3600.0
        it.recorder.add_part(MetricLog("s1", it.writer, flush_s=3600.0))
        for number, record in enumerate(records[:50], 1):
            it.take(record)
            if number % 7 == 0:
                assert (await it.reader.facts("s1")).last_step == number
                assert await count_rows(it, func.sum(MetricRow.num_steps)) == (number,)
                assert await it.state_at(number) == it.states[number]


async def test_small_rows_are_read_like_compact_ones_while_a_session_runs(tmp_path: Path) -> None:
    config, records = make_run(1, 700, 0.01)
    async with recording(tmp_path, config) as it:
        for start in range(0, 300, 25):
            await it.feed(records[start : start + 25])
        assert await count_rows(it, func.count(), func.max(ChunkRow.num_steps)) == (3, 256)
        for step in (0, 200, 256, 270, 300):
            assert await it.state_at(step) == it.states[step], f"step {step}"
        assert (await it.reader.facts("s1")).last_step == 300


async def test_states_read_one_after_the_other_do_not_disturb_each_other(tmp_path: Path) -> None:
    config, records = make_run(1, 700, 0.01)
    async with recording(tmp_path, config) as it:
        await it.feed(records)
        for step in random.Random(2).choices(range(701), k=60):
            assert as_json(await it.reader.snapshot_at("s1", step)) == it.states[step], f"step {step}"


async def test_records_come_back_exactly_from_any_range(tmp_path: Path) -> None:
    config, records = make_run(1, 700, 0.01)
    async with recording(tmp_path, config) as it:
        await it.feed(records)
        assert await it.reader.records("s1", 1, 700) == records
        assert await it.reader.records("s1", 250, 520) == records[249:520]
        assert await it.reader.records("s1", 690, 9_999) == records[689:]


async def test_without_text_no_token_id_is_in_the_file(tmp_path: Path) -> None:
    config, records = make_run(1, 700, 0.01)
    async with recording(tmp_path, config, records_text=False) as it:
        await it.feed(records)
        found = await it.reader.records("s1", 1, 700)
        assert {entry.token_id for record in found for entry in record.batch} <= {0, -1}
        snapshot = await it.reader.snapshot_at("s1", 512)
        assert snapshot.last_batch is not None
        assert {entry.token_id for entry in snapshot.last_batch.batch} <= {0, -1}
        assert as_json(snapshot) == it.states[512]


async def test_what_is_not_recorded_is_refused_with_what_is(tmp_path: Path) -> None:
    config, records = make_run(1, 700, 0.01)
    async with recording(tmp_path, config) as it:
        with pytest.raises(NotInHistoryError, match="No session 'nope' is recorded"):
            await it.reader.snapshot_at("nope", 1)
        with pytest.raises(NotInHistoryError, match="Step 1 is not recorded: session s1 has no steps yet"):
            await it.reader.decisions("s1", 1)
        await it.feed(records[:300])
        with pytest.raises(
            NotInHistoryError, match="Step 301 is not recorded: session s1 has steps 1 to 300"
        ):
            await it.reader.snapshot_at("s1", 301)
        for step in (0, 301, 302, 999):
            with pytest.raises(NotInHistoryError, match=f"Step {step} is not .* has steps 1 to 300"):
                await it.reader.decisions("s1", step)
        with pytest.raises(NotInHistoryError, match="step 7 is in the chunk that begins at 1"):
            await it.reader.chunk_frames("s1", 7)
        with pytest.raises(NotInHistoryError, match="has steps 1 to 300"):
            await it.reader.chunk_frames("s1", 513)


async def test_damaged_bytes_are_told_apart_from_missing_ones(tmp_path: Path) -> None:
    config, records = make_run(1, 700, 0.01)
    async with recording(tmp_path, config) as it:
        await it.feed(records[:300])
        await it.execute(ChunkRow.__table__.update().values(records=b"Cxxxx"))  # type: ignore[attr-defined]
        with pytest.raises(HistoryUnavailableError, match="Recorded steps are damaged"):
            await SessionReader(it.database).snapshot_at("s1", 100)
        await it.execute(KeyframeRow.__table__.update().values(state=b"Sxxxx"))  # type: ignore[attr-defined]
        with pytest.raises(HistoryUnavailableError, match="A recorded state is damaged"):
            await SessionReader(it.database).snapshot_at("s1", 256)


async def test_switching_text_on_again_brings_no_token_of_before_into_the_file(tmp_path: Path) -> None:
    config, records = make_run(1, 700, 0.01)
    async with recording(tmp_path, config, records_text=False) as it:
        await it.feed(records[:255])
        it.recorder.switch_text(is_on=True)
        batch = it.log._export(it.snapshot).last_batch  # what a state would be stored with now
        assert batch is not None
        assert {entry.token_id for entry in batch.batch} <= {0, -1}
        await it.feed(records[255:300])
        assert await it.reader.records("s1", 256, 300) == records[255:300]
        assert not (await it.reader.facts("s1")).records_text
