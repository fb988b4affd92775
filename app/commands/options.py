"""Options that several commands share."""

from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from app.setting_values import Setting
from app.settings import SETTINGS

Command = TypeVar("Command", bound=Callable[..., Any])


class WholeNumber(click.IntRange):
    """A number whose error says what it is not; click's own speaks of an "integer range"."""

    name = "whole number"


class Number(click.FloatRange):
    """The same for numbers with a fraction."""

    name = "number"


trace_option = click.option(
    "--trace", metavar="FILE", help="Azure CSV or Mooncake JSONL, or: azure-conv, mooncake."
)
speed_option = click.option(
    "--speed",
    type=Number(min=0),
    metavar="FACTOR",
    default=1.0,
    show_default=True,
    help="Arrivals are this many times faster than recorded; with 0 all come at once.",
)
scale_option = click.option(
    "--scale",
    type=Number(min=0, min_open=True),
    metavar="FACTOR",
    help="Divides the lengths of a trace.  [default: 1 azure, 32 mooncake]",
)


def setting_option(setting: Setting) -> Callable[[Command], Command]:
    """Return the decorator that gives a command the flag and the variable of one setting."""
    return click.option(
        setting.flag,
        setting.name,
        type=_make_reader(setting),
        metavar=setting.option.metavar.upper(),
        multiple=setting.is_list,
        envvar=setting.variable,
        show_envvar=True,
        help=_describe(setting),
    )


def data_dir_option(command: Command) -> Command:
    """Give a command `--data-dir`; it gets None where the default counts."""
    [setting] = [setting for setting in SETTINGS if setting.name == "data_dir"]
    return setting_option(setting)(command)


def source_of(setting: Setting, ctx: click.Context) -> str:
    """Return the flag or the variable that the value of a setting comes from."""
    is_variable = ctx.get_parameter_source(setting.name) is ParameterSource.ENVIRONMENT
    return setting.variable if is_variable else setting.flag


def _make_reader(setting: Setting) -> Callable[[str], Any]:
    """Return what reads one setting from text, on the command line and in the environment."""

    def read(text: str) -> Any:
        return setting.parse(text, source_of(setting, click.get_current_context()))

    return read


def _describe(setting: Setting) -> str:
    allowed = f" One of: {setting.shown_range}." if setting.option.choices else ""
    return f"{setting.option.help}{allowed}  [default: {setting.shown_default}]"
