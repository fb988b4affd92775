"""Every usage error is one line that names the flag or the variable, and nothing else."""

import pytest
from click.testing import CliRunner

from app.cli import main


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("serve --port abc", "--port: 'abc' is not a whole number."),
        ("serve --device tpu", "--device is 'tpu'; allowed: auto, cpu, cuda."),
        ("serve --port", "Option '--port' requires an argument."),
        ("serve more", "Got unexpected extra argument (more)"),
        ("serve --prot 1", "No such option '--prot'. Did you mean --port?"),
        ("serve --bogus", "No such option '--bogus'. pageglass serve --help lists all."),
        ("load --bogus", "No such option '--bogus'. pageglass load --help lists all."),
        ("load --rows abc", "--rows: 'abc' is not a valid whole number."),
        ("load --speed fast", "--speed: 'fast' is not a valid number."),
        ("load --seed x", "--seed: 'x' is not a valid whole number."),
        ("load", "Give exactly one of --trace and --prompts."),
        ("models ftch", "No such command 'ftch'. Did you mean 'fetch'?"),
        ("bogus", "No such command 'bogus'. pageglass --help lists all."),
        ("srve", "No such command 'srve'. Did you mean 'serve'?"),
        ("--bogus", "No such option '--bogus'. pageglass --help lists all."),
    ],
)
def test_a_usage_error_is_one_line(arguments: str, line: str) -> None:
    result = CliRunner().invoke(main, arguments.split(), prog_name="pageglass")

    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"pageglass: {line}\n")


@pytest.mark.parametrize("flag", ["--host", "--data-dir", "--model", "--served-model-name", "--allowed-host"])
def test_an_empty_value_is_refused(flag: str) -> None:
    result = CliRunner().invoke(main, ["serve", flag, ""])

    assert result.exit_code == 2
    assert result.stderr == f"pageglass: {flag}: the value is empty; leave the setting out for its default.\n"


def test_ctrl_c_is_an_exit_code_and_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(names: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("app.commands.serve.check_environment", interrupt)
    result = CliRunner().invoke(main, ["serve"])
    assert (result.exit_code, result.output) == (130, "")


def test_an_error_from_the_environment_names_the_variable() -> None:
    result = CliRunner().invoke(main, ["serve"], env={"PAGEGLASS_PORT": "x"})

    assert (result.exit_code, result.stderr) == (2, "pageglass: PAGEGLASS_PORT: 'x' is not a whole number.\n")


def test_a_group_alone_shows_what_there_is() -> None:
    for arguments in ([], ["models"]):
        assert "Commands:" in CliRunner().invoke(main, arguments).output
