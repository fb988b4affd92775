"""The `pageglass` command."""

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import click
from click.core import ParameterSource
from click.exceptions import Exit, NoArgsIsHelpError

from app.commands.history import db, sessions
from app.commands.load import load
from app.commands.models import models
from app.commands.serve import serve
from app.commands.server import EXIT_INTERRUPTED
from app.commands.simulate import simulate
from app.version import package_version
from engine.errors import EngineError


class OneLineError(click.ClickException):
    """An error that the user can mend: one line, exit code 2."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        """Print it the way Unix tools do."""
        click.echo(f"pageglass: {self.format_message()}", file=file, err=file is None)


class CommandGroup(click.Group):
    """Turns the errors that are meant for users into one line."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Read the arguments before the subcommand."""
        with _one_line():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand."""
        with _one_line():
            return super().invoke(ctx)


@contextmanager
def _one_line() -> Iterator[None]:
    """Turn errors of the user into `OneLineError`, and Ctrl-C into an exit code alone.

    A group without its subcommand still shows its help.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise Exit(EXIT_INTERRUPTED) from None
    except EngineError as error:
        raise OneLineError(" ".join(str(error).split())) from error
    except NoArgsIsHelpError:
        raise
    except click.UsageError as error:
        raise OneLineError(" ".join(_describe(error).split())) from error


def _describe(error: click.UsageError) -> str:
    """Return what is wrong, after the flag or variable that it came from, with near names only."""
    if isinstance(error, click.NoSuchOption):
        near = [name for name in error.possibilities or () if _is_near(error.option_name, name)]
        command = error.ctx.command_path if error.ctx else "pageglass"
        hint = f"Did you mean {' or '.join(near)}?" if near else f"{command} --help lists all."
        return f"{error.message} {hint}"
    if isinstance(error, click.exceptions.NoSuchCommand) and not error.possibilities:
        command = error.ctx.command_path if error.ctx else "pageglass"
        return f"{error.format_message()} {command} --help lists all."
    if isinstance(error, click.BadParameter) and isinstance(error.param, click.Option):
        return f"{_source_of(error.param, error.ctx)}: {error.message}"
    return error.format_message()


def _is_near(name: str, other: str) -> bool:
    """Whether one may be a slip of the other; the dashes that all flags share do not count."""
    return bool(difflib.get_close_matches(name.strip("-"), [other.strip("-")]))


def _source_of(option: click.Option, ctx: click.Context | None) -> str:
    is_variable = ctx is not None and ctx.get_parameter_source(option.name) is ParameterSource.ENVIRONMENT
    return str(option.envvar) if is_variable else max(option.opts, key=len)


HELP = """Serve a language model and watch it work: an OpenAI-compatible API and a live view of all KV blocks.

\b
Start here:
  pageglass models fetch     bring the small default model to this machine
  pageglass serve            then open http://127.0.0.1:8000
  pageglass load --help      give it something to do
  pageglass simulate --help  ask what other settings would have done
"""


@click.group(
    cls=CommandGroup,
    help=HELP,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_version(), prog_name="pageglass")
def main() -> None:
    """Serve a language model and watch it work."""


main.add_command(serve)
main.add_command(models)
main.add_command(load)
main.add_command(simulate)
main.add_command(sessions)
main.add_command(db)
