"""Settings of the engine as `name=value`, each name once or as a choice of several values."""

import difflib
import math
from collections.abc import Iterable
from itertools import product
from typing import Any, get_type_hints

import msgspec

from app.setting_values import parse_count, shorten
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.scheduling.preemption import make_preemption_policy
from engine.scheduling.queue import make_queue_order

MAX_VARIANTS = 32

_SWITCH = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}
_TYPES: dict[str, type] = {
    name: kind
    for name, kind in get_type_hints(EngineConfig).items()
    if name in EngineConfig.__struct_fields__
}

Changes = dict[str, Any]
"""Fields of `EngineConfig` with other values."""


def parse_variants(texts: Iterable[str]) -> list[Changes]:
    """Return the variants that `name=value` texts ask for: every combination of names with several values.

    Raises `ConfigError` naming what cannot be read, and the nearest name to one that is not known.
    """
    choices: dict[str, list[Any]] = {}
    for text in texts:
        name, value = _parse_change(text)
        values = choices.setdefault(name, [])
        if value not in values:
            values.append(value)
    variants = (
        [dict(zip(choices, values, strict=True)) for values in product(*choices.values())] if choices else []
    )
    if len(variants) > MAX_VARIANTS:
        raise ConfigError(
            f"--set asks for {len(variants)} variants; at most {MAX_VARIANTS} are compared at once."
        )
    return variants


def apply_changes(config: EngineConfig, changes: Changes) -> EngineConfig:
    """Return a configuration with changes; as at a start, sequences are limited to what the pool holds.

    Raises `ConfigError` for what cannot work.
    """
    changed = msgspec.structs.replace(config, **changes)
    if "max_model_len" not in changes:
        longest = min(changed.max_model_len, changed.num_blocks * changed.block_size)
        changed = msgspec.structs.replace(changed, max_model_len=longest)
    if changed.preemption_mode == "swap" and changed.num_host_blocks == 0:
        raise ConfigError("preemption_mode=swap needs a host tier; give --set num_host_blocks=N, too.")
    changed.validate()
    make_queue_order(changed.policy)
    make_preemption_policy(changed.preemption)
    return changed


def check_variants(config: EngineConfig, variants: Iterable[Changes]) -> None:
    """Raise `ConfigError` unless the configuration can work, both as it is and with each of the variants."""
    for changes in [Changes(), *variants]:
        apply_changes(config, changes)


def show_changes(changes: Changes) -> str:
    """Return changes the way they were written."""
    words = {True: "on", False: "off"}
    shown = {name: words[value] if isinstance(value, bool) else value for name, value in changes.items()}
    return ", ".join(f"{name}={value}" for name, value in shown.items())


def _parse_change(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    name, value = name.strip().replace("-", "_"), value.strip()
    if not (name and equals):
        raise ConfigError(
            f"--set {shorten(text)} is not of the form name=value, such as preemption=oldest-first."
        )
    if name not in _TYPES:
        near = difflib.get_close_matches(name, _TYPES, n=1, cutoff=0.0)
        raise ConfigError(f"--set {shorten(name)}: there is no such setting; the nearest is {near[0]}.")
    try:
        return name, _parse_value(_TYPES[name], value)
    except ConfigError as error:
        raise ConfigError(f"--set {name}: {error}") from None


def _parse_value(kind: type, text: str) -> Any:
    if kind is bool:
        if text.lower() not in _SWITCH:
            raise ConfigError(f"{shorten(text)} is neither on nor off.")
        return _SWITCH[text.lower()]
    if kind is int:
        return parse_count(text)
    if kind is float:
        return _parse_number(text)
    return text


def _parse_number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise ConfigError(f"{shorten(text)} is not a number of 0 or more.")
    return number
