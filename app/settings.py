"""Every setting of `pageglass serve`, declared once.

A field of `Settings` carries its own description (`Option`); command-line flags, the `PAGEGLASS_…`
environment variables and docs/settings.md are made from it. `python -m app.settings` prints that page.
"""

import difflib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import msgspec
import platformdirs

from app.model_store import DEFAULT_MODEL
from app.setting_values import (
    MAX_SIZE_BYTES,
    Option,
    parse_count,
    parse_path,
    parse_seconds,
    parse_size,
    shorten,
    show_size,
)
from engine.config import MAX_BLOCK_SIZE, MAX_NUM_BLOCKS, MAX_NUM_SEQS, EngineConfig
from engine.errors import ConfigError
from engine.run_plan import DEVICES, DTYPES, KERNELS, KV_DTYPES, RunOptions
from engine.scheduling.preemption import PREEMPTION_POLICIES
from engine.scheduling.queue import QUEUE_POLICIES

ENV_PREFIX = "PAGEGLASS_"
OTHER_VARIABLES = ("PAGEGLASS_MODELS", "PAGEGLASS_NO_BROWSER")
"""Variables with our prefix that are no server settings: the model folder, and a switch of the tests."""

DEFAULT_KV_MEMORY_BYTES = 2**30
NO_MODEL_LEN_LIMIT = 2**24
"""`max_model_len` when none is asked for: the model and the pool then set the limit."""


def _default_data_dir() -> Path:
    return Path(platformdirs.user_data_dir("pageglass", appauthor=False))


class Settings(msgspec.Struct, frozen=True, kw_only=True):
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
    device: Annotated[str, Option("Where the model runs.", choices=DEVICES)] = "auto"
    dtype: Annotated[
        str,
        Option(
            "Number format of the weights. auto: as the file has them if it is mostly 4-bit (q4), else int8; "
            "fp32 with --kernels torch, bf16 on a GPU.",
            choices=DTYPES,
        ),
    ] = "auto"
    kv_dtype: Annotated[
        str,
        Option(
            "Number format of the KV cache. auto: bf16; with --kernels torch, that of the weights.",
            choices=KV_DTYPES,
        ),
    ] = "auto"
    kernels: Annotated[
        str,
        Option(
            "What computes on the CPU: native kernels for an instruction set, or plain torch. auto: the best "
            "that the CPU has; torch where none can be had, and for --dtype fp32.",
            choices=KERNELS,
        ),
    ] = "auto"
    threads: Annotated[
        int | None,
        Option("CPU threads of the model.", parse=parse_count, low=1, high=1024, shown_default="all cores"),
    ] = None
    kv_memory: Annotated[
        int | None,
        Option(
            "Memory of the KV cache, such as 512MiB. Not together with --num-blocks.",
            parse=parse_size,
            unit="bytes",
            low=1,
            high=MAX_SIZE_BYTES,
            shown_default="1GiB",
        ),
    ] = None
    num_blocks: Annotated[
        int | None,
        Option(
            "Size of the KV cache in blocks. Not together with --kv-memory.",
            parse=parse_count,
            unit="blocks",
            low=1,
            high=MAX_NUM_BLOCKS,
            shown_default="as many as --kv-memory holds",
        ),
    ] = None
    block_size: Annotated[
        int,
        Option("Tokens in one KV block.", parse=parse_count, unit="tokens", low=1, high=MAX_BLOCK_SIZE),
    ] = 16
    max_num_seqs: Annotated[
        int,
        Option(
            "Most sequences computed in one step.",
            parse=parse_count,
            unit="sequences",
            low=1,
            high=MAX_NUM_SEQS,
        ),
    ] = 64
    max_num_batched_tokens: Annotated[
        int,
        Option(
            "Most tokens computed in one step; longer prompts are computed in chunks. More is a little "
            "quicker in all, but every answer under way waits for the whole step.",
            parse=parse_count,
            unit="tokens",
            low=1,
            high=2**20,
        ),
    ] = 256
    max_model_len: Annotated[
        int | None,
        Option(
            "Most tokens of one sequence, prompt and answer together; never more than the model knows "
            "or the KV cache holds.",
            parse=parse_count,
            unit="tokens",
            low=2,
            high=NO_MODEL_LEN_LIMIT,
            shown_default="what the model knows",
        ),
    ] = None
    max_waiting: Annotated[
        int,
        Option(
            "Most requests that may wait; more are answered with 429.",
            parse=parse_count,
            unit="requests",
            low=1,
            high=2**20,
        ),
    ] = 1024
    policy: Annotated[
        str, Option("Order in which waiting requests are admitted.", choices=QUEUE_POLICIES)
    ] = "fcfs"
    preemption: Annotated[
        str,
        Option("Which running sequence gives way when blocks run out.", choices=PREEMPTION_POLICIES),
    ] = "newest-first"
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

    @property
    def kv_memory_bytes(self) -> int | None:
        """Memory of the KV cache; None when it is counted in blocks."""
        if self.num_blocks is not None:
            return None
        return self.kv_memory or DEFAULT_KV_MEMORY_BYTES

    @property
    def run_options(self) -> RunOptions:
        """How the model is asked to be run."""
        return RunOptions(
            device=self.device,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            kernels=self.kernels,
            num_threads=self.threads,
        )

    def make_engine_config(self) -> EngineConfig:
        """Return the engine's configuration as asked for; loading resolves it against the model."""
        return EngineConfig(
            block_size=self.block_size,
            num_blocks=self.num_blocks or 1,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len or NO_MODEL_LEN_LIMIT,
            max_waiting=self.max_waiting,
            policy=self.policy,
            preemption=self.preemption,
        )


@dataclass(frozen=True)
class Setting:
    """One row of the table of settings."""

    name: str
    option: Option
    default: Any
    is_list: bool

    @property
    def flag(self) -> str:
        """Its command-line flag."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return ENV_PREFIX + self.name.upper()

    @property
    def shown_default(self) -> str:
        """Its default for people."""
        return self.option.shown_default or str(self.default)

    def parse(self, text: str, source: str) -> Any:
        """Return the value that `text` means.

        Raises `ConfigError` naming `source` (the flag or variable that it comes from) and what is allowed.
        """
        option = self.option
        if option.choices and text not in option.choices:
            raise ConfigError(f"{source} is {shorten(text)}; allowed: {', '.join(option.choices)}.")
        try:
            value = option.parse(text)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None
        if (option.low is not None and not value >= option.low) or (
            option.high is not None and not value <= option.high
        ):
            raise ConfigError(f"{source} is {text}; allowed: {self.shown_range}.")
        return value

    @property
    def shown_range(self) -> str:
        """Its allowed values for people."""
        option = self.option
        if option.choices:
            return ", ".join(option.choices)
        if option.low is None:
            return ""
        show = show_size if option.parse is parse_size else _show
        return (
            f"{show(option.low)} or more"
            if option.high is None
            else f"{show(option.low)} to {show(option.high)}"
        )


def _show(number: float) -> str:
    return str(int(number)) if number == int(number) else str(number)


def _read_table() -> tuple[Setting, ...]:
    hints = get_type_hints(Settings, include_extras=True)
    rows = []
    for field in msgspec.structs.fields(Settings):
        kind, option = get_args(hints[field.name])
        default = None if field.default is msgspec.NODEFAULT else field.default
        rows.append(Setting(field.name, option, default, is_list=kind == tuple[str, ...]))
    return tuple(rows)


SETTINGS = _read_table()


RIVALS = (("kv_memory", "num_blocks", "size the KV cache"),)
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
    return Settings(**chosen)


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
    lines = [
        "# Settings of `pageglass serve`",
        "",
        "Made by `python -m app.settings`; do not edit. A flag wins over its environment variable, and",
        "over the variable of a setting that cannot go together with it.",
        "Sizes take units (`512MiB`, `1GiB`, `2GB`).",
        "",
        "| flag | environment variable | default | unit | allowed | what it does |",
        "|---|---|---|---|---|---|",
    ]
    for row in SETTINGS:
        cells = (
            f"`{row.flag}`",
            f"`{row.variable}`",
            row.shown_default,
            row.option.unit,
            row.shown_range,
            row.option.help,
        )
        lines.append("| " + " | ".join(cells) + " |")
    others = ", ".join(f"`{name}`" for name in OTHER_VARIABLES)
    lines += ["", f"Any other `{ENV_PREFIX}…` variable is an error, except {others}.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(render_documentation())
