import json
from pathlib import Path

import pytest

from app.load.files import LoadError
from app.load.traces import TraceFormat, TraceRow, read_trace
from app.resources import data_file

AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
AZURE_ROW = "2023-11-16 18:15:46.6805900,374,44"
MOONCAKE = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}


def write(path: Path, *lines: str, end: str = "\n") -> Path:
    path.write_bytes(end.join(lines).encode())
    return path


def mooncake_line(**changes: object) -> str:
    record = {**MOONCAKE, **changes}
    return json.dumps({name: value for name, value in record.items() if value is not ...})


def test_azure_rows_are_read_with_their_odd_line_ends_and_decimals(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", AZURE_HEADER, AZURE_ROW, "2023-11-16 18:15:50.9951690,396,0", end="\r\n")

    trace = read_trace(path, max_rows=10)

    assert trace.format is TraceFormat.AZURE
    assert [row.num_prompt_tokens for row in trace.rows] == [374, 396]
    assert [row.num_output_tokens for row in trace.rows] == [44, 0]
    assert [row.arrival_s for row in trace.rows] == pytest.approx([0, 4.314579])
    assert trace.rows[0].hash_ids is None


def test_mooncake_times_are_milliseconds(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", mooncake_line(timestamp=3000), mooncake_line(timestamp=4500))

    trace = read_trace(path, max_rows=10)

    assert trace.format is TraceFormat.MOONCAKE
    assert trace.rows == [TraceRow(0.0, 600, 5, (0, 1)), TraceRow(1.5, 600, 5, (0, 1))]


def test_only_the_first_rows_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", AZURE_HEADER, AZURE_ROW, AZURE_ROW, "damaged")

    assert len(read_trace(path, max_rows=2).rows) == 2


def test_byte_order_mark_and_blank_lines_do_not_matter(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "\ufeff" + AZURE_HEADER, "", AZURE_ROW, "")

    assert len(read_trace(path, max_rows=10).rows) == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("yesterday,374,44", "line 3, field TIMESTAMP: 'yesterday' is not a date and time"),
        (AZURE_ROW.replace("374", "-1"), "line 3, field ContextTokens: '-1' is not a number of tokens"),
        (AZURE_ROW.replace("44", "4.5"), "line 3, field GeneratedTokens: '4.5' is not a number of tokens"),
        (AZURE_ROW.replace("44", "9" * 5000), "line 3, field GeneratedTokens"),
        (AZURE_ROW.replace("44", "٤"), "line 3, field GeneratedTokens"),
        (AZURE_ROW + ",1", "line 3 has 4 columns, expected are 3"),
        ("2022-01-01 00:00:00.0,1,1", "line 3, field timestamp: earlier than the row before"),
    ],
)
def test_bad_azure_rows_are_named(tmp_path: Path, row: str, message: str) -> None:
    path = write(tmp_path / "a.csv", AZURE_HEADER, AZURE_ROW, row)

    with pytest.raises(LoadError) as error:
        read_trace(path, max_rows=10)

    assert f"{path}: {message}" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"timestamp": ...}, "field timestamp: missing"),
        ({"timestamp": 0.5}, "field timestamp: 0.5 is not a whole number"),
        ({"timestamp": True}, "field timestamp: True is not a whole number"),
        ({"input_length": "600"}, "field input_length: 600 is not a whole number"),
        ({"output_length": -1}, "field output_length: -1 is not a whole number"),
        ({"output_length": 10**12}, "field output_length"),
        ({"hash_ids": [0]}, "field hash_ids: expected are 2 whole numbers, one per 512 tokens"),
        ({"hash_ids": [0, "1"]}, "field hash_ids: not a list of whole numbers"),
        ({"hash_ids": None}, "field hash_ids: not a list of whole numbers"),
        ({"chat_id": 7}, "field chat_id: not part of a Mooncake trace"),
    ],
)
def test_bad_mooncake_rows_are_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    path = write(tmp_path / "m.jsonl", mooncake_line(), mooncake_line(**changes))

    with pytest.raises(LoadError) as error:
        read_trace(path, max_rows=10)

    assert f"{path}: line 2, {message}" in str(error.value)


@pytest.mark.parametrize("line", ["{", "[1]", '{"timestamp": 1}{}', "{" * 100_000])
def test_broken_json_is_named(tmp_path: Path, line: str) -> None:
    path = write(tmp_path / "m.jsonl", mooncake_line(), line)

    with pytest.raises(LoadError, match="line 2 is not a JSON object"):
        read_trace(path, max_rows=10)


@pytest.mark.parametrize(
    "header", ["Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type", "a", "[1, 2]"]
)
def test_other_formats_are_refused_instead_of_guessed(tmp_path: Path, header: str) -> None:
    path = write(tmp_path / "x.csv", header, "1,2,3")

    with pytest.raises(LoadError, match="line 1 is neither the header"):
        read_trace(path, max_rows=10)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"\n\n", "the file is empty"),
        (AZURE_HEADER.encode(), "there is no request in the file"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
        (b"x" * (2**20 + 1), "line 1 has more than 1048576 characters"),
    ],
)
def test_files_that_hold_no_trace_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)

    with pytest.raises(LoadError, match=message):
        read_trace(path, max_rows=10)


def test_unreadable_file_is_an_error_of_one_line(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="No such file"):
        read_trace(tmp_path / "missing.csv", max_rows=1)


@pytest.mark.parametrize(
    ("name", "trace_format"),
    [("azure-conv.csv", TraceFormat.AZURE), ("mooncake.jsonl", TraceFormat.MOONCAKE)],
)
def test_shipped_traces_are_valid(name: str, trace_format: TraceFormat) -> None:
    trace = read_trace(data_file(name), max_rows=1000)

    assert trace.format is trace_format
    assert len(trace.rows) == 200
    assert trace.rows[0].arrival_s == 0
