import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from app.cli import main


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["simulate", *arguments], prog_name="pageglass")


@pytest.mark.parametrize("arguments", [[], ["--trace", "mooncake", "--session", "s"]])
def test_exactly_one_source_is_wanted(arguments: list[str]) -> None:
    result = run(*arguments)

    assert result.exit_code == 2
    assert "Give exactly one of --session and --trace." in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--trace", "nothing"],
            "--trace nothing: there is no such file; shipped are: azure-conv, mooncake.",
        ),
        (["--trace", "mooncake", "--limit", "0"], "--limit: 0"),
        (["--trace", "mooncake", "--speed", "-1"], "--speed: -1.0"),
        (["--trace", "mooncake", "--scale", "0"], "--scale: 0.0"),
        (["--trace", "mooncake", "--speed", "nan"], "--speed: 'nan' is not a valid number"),
        (["--trace", "mooncake", "--speed", "inf"], "--speed: 'inf' is not a valid number"),
        (
            ["--trace", "mooncake", "--speed", "1e-300"],
            "--speed: 1e-300 is not 0, or from 0.000001 to 1,000,000",
        ),
        (["--trace", "mooncake", "--scale", "nan"], "--scale: 'nan' is not a valid number"),
        (["--trace", "mooncake", "--scale", "1e-320"], "--scale: 1e-320 is not from 0.000001 to 1,000,000"),
        (["--trace", "mooncake", "--limit", "9" * 23], "--limit: 9999"),
        (["--trace", "mooncake", "--num-blocks", "0"], "--num-blocks: 0"),
        (["--trace", "mooncake", "--set", "num_block=9"], "the nearest is num_blocks"),
        (["--trace", "mooncake", "--set", "preemption=none"], "preemption is 'none'; allowed: newest-first"),
        (
            ["--trace", "mooncake", "--scale", "0.001"],
            "no request fits into 8192 tokens; give a larger --scale",
        ),
        (["--session", "s", "--scale", "2"], "--scale divides the lengths of a trace"),
        (["--session", "s"], "No sessions in"),
        (["--trace", "mooncake", "--costs", "s"], "No sessions in"),
    ],
)
def test_bad_input_is_one_line_that_says_what_to_do(arguments: list[str], message: str) -> None:
    result = run(*arguments)

    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_trace_is_compared_under_several_settings() -> None:
    arguments = ["--trace", "azure-conv", "--limit", "30", "--scale", "8", "--speed", "20"]
    result = run(*arguments, "--set", "preemption=oldest-first", "--num-blocks", "60", "--num-blocks", "2912")

    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "trace azure-conv (azure)"
    assert "default model (smollm2-135m-instruct) on two cores" in lines[1]
    assert "Only the first 30 requests are simulated." in lines
    assert "The lengths of the trace are divided by 8." in lines
    heads = [line.split() for line in lines if "num_blocks=60" in line or "simulated" in line.split()]
    assert heads == [["simulated", *["preemption=oldest-first"] * 2], ["num_blocks=60", "num_blocks=2912"]]
    [finished] = [line.split() for line in lines if line.startswith("finished")]
    assert finished == ["finished", "30", "30", "30"]


def test_the_same_trace_gives_the_same_figures_as_json() -> None:
    arguments = [
        "--trace",
        "mooncake",
        "--limit",
        "20",
        "--speed",
        "40",
        "--set",
        "enable_prefix_caching=off",
        "--json",
    ]

    first, second = run(*arguments), run(*arguments)

    assert first.stdout == second.stdout
    document = json.loads(first.stdout)
    base, changed = document["runs"]
    assert (base["name"], base["changes"]) == ("simulated", {})
    assert changed["changes"] == {"enable_prefix_caching": False}
    assert base["figures"]["hit_percent"] > changed["figures"]["hit_percent"] == 0
    assert base["figures"]["num_finished"] == 20
    assert document["errors_percent"] == {}


def test_rows_of_a_trace_without_prompt_or_answer_are_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = [(9, 3), (9, 0), (0, 3), (20_000, 3)]
    lines = [f"2023-11-16 18:15:50.9951690,{prompt},{output}" for prompt, output in rows]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))

    document = json.loads(run("--trace", str(path), "--json").stdout)

    assert document["runs"][0]["figures"]["num_finished"] == 1
    assert document["notes"] == [
        "2 requests with a length of 0 are left out.",
        "1 requests longer than 8192 tokens are left out.",
    ]


def test_a_trace_of_nothing_but_empty_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 0, "output_length": 9, "hash_ids": []}\n')

    result = run("--trace", str(path))

    assert result.exit_code == 2
    assert "no request has a prompt and an answer; their lengths are 0." in result.stderr


def test_a_damaged_trace_names_line_and_field(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": "x", "hash_ids": [1]}\n')

    result = run("--trace", str(path))

    assert result.exit_code == 2
    assert "line 1, field output_length" in result.stderr


def test_help_teaches_with_examples() -> None:
    result = run("--help")

    assert "pageglass simulate --session 3f2a --set preemption=oldest-first" in result.stdout
    assert "recompute tax " in result.stdout
    assert "several times makes a variant of each value" in result.stdout
