"""Options that several commands share."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from app.setting_values import Setting
from app.settings import SETTINGS

Command = TypeVar("Command", bound=Callable[..., Any])


MAX_WHOLE = 10**9
"""More than anybody needs; Python's own limits are reached without a word for people."""

MIN_FACTOR, MAX_FACTOR = 1e-6, 1e6


class WholeNumber(click.IntRange):
    """A number whose error says what it is not; click's own speaks of an "integer range"."""

    name = "whole number"

    def __init__(self, *, min: int, max: int = MAX_WHOLE) -> None:  # noqa: A002 - click's names
        """Take numbers from `min` to `max`."""
        super().__init__(min=min, max=max)


class Factor(click.FloatRange):
    """The same for a number to multiply or divide by; `allows_zero` beside the usual range."""

    name = "number"

    def __init__(self, *, allows_zero: bool = False) -> None:
        """Take numbers from `MIN_FACTOR` to `MAX_FACTOR`."""
        super().__init__(min=MIN_FACTOR, max=MAX_FACTOR)
        self._allows_zero = allows_zero

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number; infinite ones and NaN, which no range leaves out, are none."""
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            self.fail(f"{str(value)!r} is not a valid number.", param, ctx)
        if number == 0 and self._allows_zero:
            return 0.0
        if not MIN_FACTOR <= number <= MAX_FACTOR:
            zero = "0, or " if self._allows_zero else ""
            self.fail(f"{number} is not {zero}from {MIN_FACTOR:f} to {MAX_FACTOR:,.0f}.", param, ctx)
        return number


trace_option = click.option(
    "--trace", metavar="FILE", help="Azure CSV or Mooncake JSONL, or: azure-conv, mooncake."
)
speed_option = click.option(
    "--speed",
    type=Factor(allows_zero=True),
    metavar="FACTOR",
    default=1.0,
    show_default=True,
    help="Arrivals are this many times faster than recorded; with 0 all come at once.",
)
scale_option = click.option(
    "--scale",
    type=Factor(),
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
