"""The `pageglass` command."""

from importlib.metadata import PackageNotFoundError, version
from typing import IO, Any

import click

from app.commands.load import load
from app.commands.models import models
from app.commands.serve import serve
from engine.errors import EngineError


class OneLineError(click.ClickException):
    """An error that the user can mend: one line, exit code 2."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        """Print it the way Unix tools do."""
        click.echo(f"pageglass: {self.format_message()}", file=file, err=file is None)


class CommandGroup(click.Group):
    """Turns the errors that are meant for users into one line."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand."""
        try:
            return super().invoke(ctx)
        except EngineError as error:
            raise OneLineError(" ".join(str(error).split())) from error


HELP = """Serve a language model and watch it work: an OpenAI-compatible API and a live view of all KV blocks.

\b
Start here:
  pageglass models fetch     bring the small default model to this machine
  pageglass serve            then open http://127.0.0.1:8000
  pageglass load --help      give it something to do
"""


def _get_version() -> str:
    try:
        return version("pageglass")
    except PackageNotFoundError:
        return "unknown (not installed)"


@click.group(
    cls=CommandGroup,
    help=HELP,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(_get_version(), prog_name="pageglass")
def main() -> None:
    """Serve a language model and watch it work."""


main.add_command(serve)
main.add_command(models)
main.add_command(load)
