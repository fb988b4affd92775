"""Every setting of `pageglass serve`, declared once.

A field of `Settings` carries its own description (`Option`); command-line flags, the `PAGEGLASS_…`
environment variables and docs/settings.md are made from it. `python -m app.settings` prints that page.
"""

import difflib
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import platformdirs

from app.engine_settings import EngineSettings
from app.model_store import DEFAULT_MODEL
from app.setting_values import (
    ENV_PREFIX,
    MAX_SIZE_BYTES,
    Option,
    parse_count,
    parse_path,
    parse_seconds,
    parse_size,
    read_table,
    render_rows,
)
from engine.errors import ConfigError

OTHER_VARIABLES = ("PAGEGLASS_MODELS", "PAGEGLASS_NO_BROWSER")
"""Variables with our prefix that are no server settings: the model folder, and a switch of the tests."""


def _default_data_dir() -> Path:
    return Path(platformdirs.user_data_dir("pageglass", appauthor=False))


class Settings(EngineSettings, frozen=True, kw_only=True):
    """Settings of one server; nothing changes them after start-up."""

    model: Annotated[str, Option("Model to serve: a name from `pageglass models list`, or a path.")] = (
        DEFAULT_MODEL
    )
    served_model_name: Annotated[
        str | None, Option("Name of the model in the API.", shown_default="the model's own name")
    ] = None
    host: Annotated[str, Option("Address to listen on; 0.0.0.0 for all, which nothing protects yet.")] = (
        "127.0.0.1"
    )
    port: Annotated[
        int, Option("Port to listen on; 0 takes a free one.", parse=parse_count, low=0, high=65535)
    ] = 8000
    allowed_host: Annotated[
        tuple[str, ...],
        Option(
            "A host name under which browsers may reach this server, beside localhost and --host; its "
            "pages may also come through a TLS proxy on port 443 (https://NAME). "
            "May be given several times; in the environment separate names by spaces.",
            shown_default="none",
        ),
    ] = ()
    data_dir: Annotated[
        Path,
        Option(
            "Folder for everything the server keeps; one server at a time may use it.",
            parse=parse_path,
            shown_default="the platform's user data folder",
        ),
    ] = msgspec.field(default_factory=_default_data_dir)
    max_concurrency_per_key: Annotated[
        int,
        Option(
            "Most requests that one client may have open below /v1; more are answered with 429. A client is "
            "its API key, else the request's `user`, else its address. 0: no limit.",
            parse=parse_count,
            unit="requests",
            low=0,
            high=2**20,
        ),
    ] = 0
    record_text: Annotated[
        str,
        Option(
            "Whether prompts, answers and token ids are kept in the history, or only their lengths; "
            "can be switched in the browser.",
            choices=("on", "off"),
        ),
    ] = "on"
    history_size: Annotated[
        int,
        Option(
            "How large the history may grow before the oldest steps are given up, such as 512MiB.",
            parse=parse_size,
            unit="bytes",
            low=2**20,
            high=MAX_SIZE_BYTES,
            shown_default="2GiB",
        ),
    ] = 2**31
    shutdown_timeout: Annotated[
        float,
        Option(
            "How long open requests may go on after Ctrl-C or SIGTERM before they are ended.",
            parse=parse_seconds,
            unit="seconds",
            low=0,
            high=3600,
        ),
    ] = 5.0
    log_level: Annotated[
        str, Option("How much is logged.", choices=("debug", "info", "warning", "error"))
    ] = "info"

    @property
    def model_name(self) -> str:
        """The model's name in the API: as asked, or the model's own (a path's last part)."""
        if self.served_model_name:
            return self.served_model_name
        return Path(self.model).name.removesuffix(".gguf") or self.model


SETTINGS = read_table(Settings, EngineSettings)
"""In the order in which they are shown: first the server's, then the engine's."""


RIVALS = (
    ("kv_memory", "num_blocks", "size the KV cache"),
    ("gpu_memory_utilization", "kv_memory", "size the KV cache"),
    ("gpu_memory_utilization", "num_blocks", "size the KV cache"),
)
"""Pairs of settings that mean the same thing in two ways, and what that is."""


def make_settings(values: Mapping[str, Any], sources: Mapping[str, str]) -> Settings:
    """Build settings from parsed values; absent ones keep their default.

    `sources` names the flag or variable of each value. A flag wins over the environment also where a
    variable sets its rival; two flags or two variables that are rivals are a `ConfigError`.
    """
    chosen = dict(values)
    for first, second, purpose in RIVALS:
        if first not in chosen or second not in chosen:
            continue
        from_variables = [name for name in (first, second) if sources[name].startswith(ENV_PREFIX)]
        if len(from_variables) != 1:
            raise ConfigError(
                f"{sources[first]} and {sources[second]} are both given; both {purpose}, keep one."
            )
        del chosen[from_variables[0]]
    settings = Settings(**chosen)
    _check_together(settings, sources)
    return settings


def _check_together(settings: Settings, sources: Mapping[str, str]) -> None:
    if settings.preemption_mode == "swap" and not settings.swap_memory:
        raise ConfigError(f"{sources['preemption_mode']} is swap, which needs memory; give --swap-memory.")
    if settings.tensor_parallel_size > 1 and settings.swap_memory:
        raise ConfigError(
            f"{sources['tensor_parallel_size']} and {sources['swap_memory']} are both given; only a single "
            "process can keep blocks in host memory, keep one."
        )
    names = Counter(name for name, _ in settings.priority_class)
    for name, count in names.items():
        if count > 1:
            raise ConfigError(f"{sources['priority_class']}: {name!r} is there more than once; keep one.")


def check_environment(names: Iterable[str]) -> None:
    """Raise `ConfigError` for a variable with our prefix that means nothing, naming a near one."""
    known = [*(setting.variable for setting in SETTINGS), *OTHER_VARIABLES]
    for name in sorted(names):
        if name.startswith(ENV_PREFIX) and name not in known:
            short_names = [other.removeprefix(ENV_PREFIX) for other in known]
            near = difflib.get_close_matches(name.removeprefix(ENV_PREFIX), short_names, n=1)
            hint = f"did you mean {ENV_PREFIX}{near[0]}? Otherwise unset it." if near else "unset it."
            raise ConfigError(f"the environment variable {name} is not known; {hint}")


def render_documentation() -> str:
    """Return docs/settings.md."""
    others = ", ".join(f"`{name}`" for name in OTHER_VARIABLES)
    lines = [
        "# Settings of `pageglass serve`",
        "",
        "Made by `python -m app.settings`; do not edit. A flag wins over its environment variable, and",
        "over the variable of a setting that cannot go together with it.",
        "Sizes take units (`512MiB`, `1GiB`, `2GB`).",
        "",
        *render_rows(SETTINGS),
        "",
        f"Any other `{ENV_PREFIX}…` variable is an error, except {others}.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(render_documentation())
