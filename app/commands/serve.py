"""`pageglass serve`: check everything that can be checked at once, then serve."""

import os
from typing import Any

import click

from app.commands.options import Command, setting_option, source_of
from app.commands.preparation import bind_sockets, check_model, lock_data_dir, show_url
from app.commands.server import run_server
from app.model_store import explain_damage, resolve_model
from app.settings import SETTINGS, Settings, check_environment, make_settings
from app.telemetry import configure_logging
from engine.model.check import open_model

HELP = """Serve a model: the OpenAI API, and a live view of its KV blocks at the printed address.

\b
Examples:
  pageglass serve
  pageglass serve --model ~/models/qwen3-0.6b --port 9000
  pageglass serve --num-blocks 64           a small cache: watch preemption at work
  PAGEGLASS_KV_MEMORY=4GiB pageglass serve

The server answers at once and says when the model is ready. Ctrl-C lets open requests end, for at
most --shutdown-timeout seconds; a second Ctrl-C ends it at once.
"""


def setting_options(command: Command) -> Command:
    """Give a command one option for each setting, in the order of the table."""
    for setting in reversed(SETTINGS):
        command = setting_option(setting)(command)
    return command


@click.command(help=HELP)
@setting_options
def serve(**values: Any) -> None:
    """Check everything that can be checked now, then serve."""
    check_environment(os.environ)
    ctx = click.get_current_context()
    given = {name: value for name, value in values.items() if value not in (None, ())}
    settings = make_settings(given, {setting.name: source_of(setting, ctx) for setting in SETTINGS})
    model_path = resolve_model(settings.model)
    with explain_damage(model_path):
        files = open_model(model_path)
    check_model(settings, files)
    configure_logging(settings.log_level)
    with lock_data_dir(settings.data_dir), bind_sockets(settings.host, settings.port) as sockets:
        url = show_url(settings.host, sockets[0].getsockname()[1])
        _warn_if_open(settings)
        run_server(settings, sockets, url)


def _warn_if_open(settings: Settings) -> None:
    if settings.host not in {"localhost", "127.0.0.1", "::1"}:
        click.echo(
            f"Listening on {settings.host}: anyone who reaches this address can use the model, there are no "
            "keys yet. Browsers need the name they use in --allowed-host.",
            err=True,
        )
