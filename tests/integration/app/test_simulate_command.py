"""`pageglass simulate` on sessions as servers leave them."""

import asyncio
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from app.cli import main
from app.db.database import DATABASE_FILE
from app.errors import NotInHistoryError
from app.history.session_file import open_session
from engine.config import EngineConfig
from engine.records import Arrived, Finished, Policies, RecordKind, Rejected, StepRecord
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


def test_settings_are_checked_before_the_records_are_read(folder: Path) -> None:
    record(folder, "short", *make_run(12, 9))

    for change in ("policy=foo", "max_num_seqs=0", "preemption_mode=swap"):
        for arguments in (["--session", "short"], ["--trace", "azure-conv", "--costs", "short"]):
            result = run(folder, *arguments, "--set", change)
            assert result.exit_code == 2
            assert change.split("=")[0] in result.stderr
            assert "costs need 20" not in result.stderr


def run_changed() -> tuple[EngineConfig, list[StepRecord]]:
    """Return a run over a host tier, with other policies from before its first request on."""
    config, records = make_run(11, 300)
    config = msgspec.structs.replace(config, num_host_blocks=30)
    event = Policies("priority", "oldest-first", "swap")
    return config, [msgspec.structs.replace(records[0], events=[event, *records[0].events]), *records[1:]]


def test_a_policy_that_was_in_force_anyway_changes_nothing(tmp_path: Path) -> None:
    record(tmp_path, "changed", *run_changed())
    arguments = [
        "--set",
        "policy=priority",
        "--set",
        "preemption=oldest-first",
        "--set",
        "preemption_mode=swap",
    ]

    figures = [
        json.loads(run(tmp_path, "--session", "changed", *arguments[:number], "--json").stdout)["runs"]
        for number in (2, 4, 6)
    ]
    [other] = [
        entry["figures"]
        for entry in json.loads(
            run(tmp_path, "--session", "changed", "--set", "preemption=newest-first", "--json").stdout
        )["runs"][2:]
    ]

    simulated = figures[0][1]["figures"]
    assert [runs[2]["figures"] for runs in figures] == [simulated] * 3
    assert other != simulated


def test_what_does_not_go_with_a_recorded_change_of_policy_is_refused_before_anything_runs(
    tmp_path: Path,
) -> None:
    record(tmp_path, "changed", *run_changed())

    refused = run(tmp_path, "--session", "changed", "--set", "num_host_blocks=0")
    helped = run(
        tmp_path, "--session", "changed", "--set", "num_host_blocks=0", "--set", "preemption_mode=recompute"
    )

    assert refused.exit_code == 2
    assert "the session went over to policy=priority, preemption=oldest-first" in refused.stderr
    assert helped.exit_code == 0


def test_requests_that_were_open_or_failed_or_refused_are_noted(tmp_path: Path) -> None:
    config, records = make_run(3, 150, fail_rate=0.05)
    record(tmp_path, "crash", config, records)
    ends = {event.seq_id for step in records for event in step.events if isinstance(event, Finished)}
    num_open = sum(
        event.seq_id not in ends for step in records for event in step.events if isinstance(event, Arrived)
    )

    notes = json.loads(run(tmp_path, "--session", "crash", "--json").stdout)["notes"]

    assert num_open > 0
    assert (
        f"{num_open} requests were open where the records end: in simulations they leave then, as aborted."
    ) in notes
    assert any("requests failed: in simulations they leave at that moment, as aborted." in n for n in notes)
    assert any("any number may wait, unless max_waiting is set" in note for note in notes)


def test_the_length_of_the_queue_counts_only_where_it_is_set(tmp_path: Path) -> None:
    config, records = make_run(11, 300)
    record(tmp_path, "full", msgspec.structs.replace(config, max_waiting=2), records)
    num_refused_for_good = sum(
        isinstance(event, Rejected) and event.code != "queue_full"
        for step in records
        for event in step.events
    )
    assert num_refused_for_good

    document = json.loads(run(tmp_path, "--session", "full", "--set", "max_waiting=2", "--json").stdout)

    recorded, simulated, limited = (entry["figures"] for entry in document["runs"])
    assert simulated["num_rejected"] == 0
    assert simulated["num_requests"] == recorded["num_requests"]
    assert limited["num_rejected"] > 0


def change_history(folder: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(folder / DATABASE_FILE)) as connection:
        connection.execute(statement, values)
        connection.commit()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{}", "missing are block_size, num_blocks, "),
        ("[]", "Expected `object`, got `array`"),
        ("{", "Input data was truncated"),
        (None, "block_size is 0; allowed: 1 to 256"),
    ],
)
def test_settings_of_a_session_that_are_not_readable_are_said_to_be(
    folder: Path, config: str | None, message: str
) -> None:
    change_history(
        folder, "UPDATE sessions SET config = coalesce(?, json_set(config, '$.block_size', 0))", config
    )

    result = run(folder, "--session", "abcd1234")

    assert result.exit_code == 2
    assert "The settings of session abcd1234 are not readable: " in result.stderr
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


async def test_parameters_that_are_not_readable_name_their_request(tmp_path: Path) -> None:
    name = await record_session(tmp_path, num=30)

    for params in ("", "{", "[1]", '{"temperature": "hot"}', b"\xff", 3):
        change_history(tmp_path, "UPDATE requests SET params = ?", params)
        result = run(tmp_path, "--session", name)

        assert result.exit_code == 2
        assert "The parameters of request " in result.stderr
        assert f"of session {name} are not readable: " in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1


def test_settings_that_an_older_version_did_not_have_are_noted(folder: Path) -> None:
    change_history(
        folder,
        "UPDATE sessions SET config = json_remove(config, '$.lookahead', '$.preemption_mode', "
        "'$.recompute_ns_per_token')",
    )
    note = (
        "Session abcd1234 is of an older version, without these settings; simulated with "
        "preemption_mode=auto, lookahead=on."
    )

    of_session = json.loads(run(folder, "--session", "abcd1234", "--json").stdout)
    of_trace = json.loads(
        run(
            folder, "--trace", "azure-conv", "--costs", "abcd", "--scale", "100", "--limit", "9", "--json"
        ).stdout
    )

    assert note in of_session["notes"]
    assert note in of_trace["notes"]


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
