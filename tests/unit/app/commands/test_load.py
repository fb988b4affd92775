from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from app.commands.load import load
from app.load.files import LoadError

NOBODY = "http://127.0.0.1:9"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(load, ["--url", NOBODY, *arguments])


@pytest.mark.parametrize("arguments", [[], ["--trace", "mooncake", "--prompts", "mt-bench"]])
def test_exactly_one_source_is_wanted(arguments: list[str]) -> None:
    result = run(*arguments)

    assert result.exit_code == 2
    assert "Give exactly one of --trace and --prompts." in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--rows", "0"],
        ["--rows", "9" * 23],
        ["--speed", "-1"],
        ["--speed", "nan"],
        ["--speed", "1e-300"],
        ["--speed", "fast"],
        ["--scale", "0"],
        ["--scale", "nan"],
        ["--scale", "inf"],
        ["--scale", "1e-320"],
        ["--concurrency", "0"],
        ["--max-tokens", "0"],
        ["--max-tokens", "9" * 23],
    ],
)
def test_options_out_of_range_are_refused(arguments: list[str]) -> None:
    result = run("--trace", "mooncake", *arguments)

    assert result.exit_code == 2
    assert arguments[0] in result.stderr


@pytest.mark.parametrize("option", ["--trace", "--prompts"])
def test_unknown_name_lists_what_is_shipped(option: str) -> None:
    error = run(option, "nothing").exception

    assert isinstance(error, LoadError)
    assert "There is no file 'nothing'; shipped are: " in str(error)


@pytest.mark.parametrize(
    ("option", "name", "message"),
    [
        (
            "--trace",
            "mt-bench",
            "mt-bench is for --prompts, not for --trace: pageglass load --prompts mt-bench",
        ),
        ("--prompts", "mooncake", "mooncake is for --trace, not for --prompts"),
        ("--prompts", "azure-conv", "azure-conv is for --trace, not for --prompts"),
    ],
)
def test_name_given_to_the_other_option_points_there(option: str, name: str, message: str) -> None:
    error = run(option, name).exception

    assert isinstance(error, LoadError)
    assert message in str(error)


@pytest.mark.parametrize("option", ["--trace", "--prompts"])
def test_folder_and_empty_file_are_called_what_they_are(option: str, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()

    assert "this is a folder" in str(run(option, str(tmp_path)).exception)
    assert "the file is empty" in str(run(option, str(tmp_path / "empty")).exception)


def test_file_is_checked_before_the_server_is_asked(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"turns": []}')

    error = run("--prompts", str(path)).exception

    assert isinstance(error, LoadError)
    assert f"{path}: line 1, field turns" in str(error)


@pytest.mark.parametrize(
    "source", [["--trace", "azure-conv"], ["--trace", "mooncake"], ["--prompts", "mt-bench"]]
)
def test_shipped_data_works_by_name(source: list[str]) -> None:
    error = run(*source).exception

    assert isinstance(error, LoadError)
    assert str(error) == f"No answer from {NOBODY}: no connection."


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ("premium", "'premium' is no class with its share; write priorities like premium=0.2,bulk=0.3."),
        ("premium=0.9,bulk=0.9", "The shares add up to 1.8; allowed: at most 1."),
    ],
)
def test_a_mix_of_priorities_is_checked_before_anything_else(mix: str, message: str) -> None:
    error = run("--prompts", "nothing", "--priority", mix).exception

    assert isinstance(error, LoadError)
    assert str(error) == message
