"""`pageglass simulate` on sessions as servers leave them."""

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from app.cli import main
from app.db.database import DATABASE_FILE
from app.errors import NotInHistoryError
from app.history.session_file import open_session
from engine.config import EngineConfig
from engine.records import RecordKind, StepRecord
from engine.simulate.pace import RecordedPace
from engine.simulate.session import read_session
from engine.simulate.simulation import Simulation
from tests.support.recorded import record_session
from tests.support.recording import make_run, recording


def run(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(
        main, ["simulate", "--data-dir", str(folder), *arguments], prog_name="pageglass"
    )


def record(folder: Path, name: str, config: EngineConfig, records: list[StepRecord]) -> None:
    """Leave a session in the history of `folder`."""

    async def write() -> None:
        async with recording(folder, config, name) as session:
            await session.feed(records)

    asyncio.run(write())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A history with one session of 300 steps."""
    record(tmp_path, "abcd1234", *make_run(11, 300))
    return tmp_path


def test_a_session_is_shown_beside_its_simulations(folder: Path) -> None:
    result = run(folder, "--session", "abcd", "--set", "preemption=oldest-first")

    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "session abcd1234 (fake)"
    assert "fitted to" in lines[1]
    [heads] = [line.split() for line in lines if "simulated" in line.split()]
    assert heads == ["recorded", "simulated", "preemption=oldest-first"]
    assert lines[-1].startswith("error of the simulation as recorded: first token mean ms ")
    [rejected] = [line for line in lines if "rejected requests are left out" in line]
    assert rejected.split()[0].isdigit()


def test_recorded_figures_are_those_of_the_records(folder: Path) -> None:
    _, records = make_run(11, 300)

    document = json.loads(run(folder, "--session", "abcd1234", "--json").stdout)

    recorded, simulated = (entry["figures"] for entry in document["runs"])
    assert recorded["num_steps"] == sum(step.kind == RecordKind.STEP for step in records)
    assert recorded["num_computed_tokens"] == sum(e.num_scheduled for step in records for e in step.batch)
    assert simulated["num_finished"] + simulated["num_aborted"] == recorded["num_requests"]
    assert set(document["errors_percent"]) == {"ttft_mean_ms", "output_tok_s"}


def test_part_of_a_session_has_no_recorded_column(folder: Path) -> None:
    document = json.loads(
        run(folder, "--session", "abcd1234", "--limit", "10", "--speed", "2", "--json").stdout
    )

    assert [entry["name"] for entry in document["runs"]] == ["simulated"]
    assert document["runs"][0]["figures"]["num_requests"] == 10
    assert "Requests arrive 2 times faster." in document["notes"]


def test_costs_and_settings_of_a_session_count_for_a_trace(folder: Path) -> None:
    arguments = ["--trace", "azure-conv", "--costs", "abcd1234", "--scale", "100", "--limit", "9", "--json"]
    result = run(folder, *arguments)

    document = json.loads(result.stdout)
    assert document["costs_source"].startswith("fitted to ")
    assert document["runs"][0]["config"]["num_blocks"] == 24


def test_a_session_that_is_too_short_says_where_costs_may_come_from(folder: Path) -> None:
    record(folder, "short", *make_run(12, 9))

    refused = run(folder, "--session", "short")
    helped = run(folder, "--session", "short", "--costs", "abcd1234")

    assert refused.exit_code == 2
    assert "costs need 20 at least. Give another session with --costs." in refused.stderr
    assert helped.exit_code == 0


def test_unknown_and_ambiguous_sessions_are_refused(folder: Path) -> None:
    record(folder, "abcd9", *make_run(12, 9))
    path = folder / DATABASE_FILE

    assert open_session(path, "abcd1").id == "abcd1234"
    with pytest.raises(NotInHistoryError, match="'abcd' is the beginning of several sessions: "):
        open_session(path, "abcd")
    with pytest.raises(
        NotInHistoryError, match=r"No session 'x%' is recorded in .*pageglass sessions list shows all"
    ):
        open_session(path, "x%")


async def test_what_a_server_decided_is_decided_again_from_its_history(tmp_path: Path) -> None:
    name = await record_session(tmp_path, num=30)
    session = open_session(tmp_path / DATABASE_FILE, name)
    records = list(session.records())

    load = read_session(records, session.config, session.temperatures, exact=True)
    again = list(Simulation(session.config, load, RecordedPace(records)).records())

    assert [step.step for step in records] == list(range(1, session.last_step + 1))
    assert _batches(again) == _batches(records)
    assert _events(again, "preempted") == _events(records, "preempted") != []
    assert _events(again, "admitted") == _events(records, "admitted")


def _batches(records: list[StepRecord]) -> list[list[tuple[int, ...]]]:
    return [
        [(entry.seq_id, entry.slot, entry.num_computed_before, entry.num_scheduled) for entry in step.batch]
        for step in records
        if step.batch
    ]


def _events(records: list[StepRecord], tag: str) -> list[object]:
    """Return events of one kind; what they say of why a prefix was missing is left out."""
    kept = [event for step in records for event in step.events if event.__struct_config__.tag == tag]
    return [
        {name: getattr(event, name) for name in event.__struct_fields__ if name != "miss"} for event in kept
    ]
