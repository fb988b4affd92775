"""`pageglass simulate`: what other settings would have done to a recorded session or a trace."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import msgspec

from app.commands.history import check_revision, explain_file_faults, find_history_file
from app.commands.options import (
    WholeNumber,
    data_dir_option,
    scale_option,
    speed_option,
    trace_option,
)
from app.commands.progress import ProgressLine
from app.errors import NotInHistoryError
from app.history.session_file import SessionFile, open_session
from app.load.files import LoadError
from app.load.sources import SHIPPED_TRACES
from app.load.traces import read_trace
from app.resources import data_file
from app.services.simulation_settings import Changes, check_variants, parse_variants
from app.services.simulations import (
    BUILT_IN_COSTS,
    DEFAULT_CONFIG,
    Comparison,
    Costs,
    LoadOptions,
    OnProgress,
    Source,
    compare,
    errors_percent,
    make_source,
    notes_on_version,
    read_costs,
    read_session,
)

_MIN_WIDTH = 10

_ROWS = {
    "ttft_mean_ms": "first token mean ms",
    "ttft_p50_ms": "first token p50 ms",
    "ttft_p99_ms": "first token p99 ms",
    "inter_token_mean_ms": "inter-token mean ms",
    "inter_token_p99_ms": "inter-token p99 ms",
    "output_tok_s": "output tok/s",
    "num_steps": "steps",
    "num_preemptions": "preemptions",
    "num_swaps": "of these by swap",
    "num_recomputed_tokens": "recomputed tokens",
    "recompute_percent": "recompute tax %",
    "hit_percent": "cache hits %",
    "num_finished": "finished",
    "num_aborted": "aborted",
    "num_failed": "failed",
    "num_rejected": "rejected",
}
"""Figures that the table shows, with their names there."""

HELP = """Simulate a recorded session or a trace with other settings, and compare.

The scheduler and the KV cache are the real ones; the model is replaced by what its steps cost, and time by a
simulated clock. Minutes of traffic take seconds, and the same input gives the same figures.

\b
  pageglass sessions list
  pageglass simulate --session 3f2a --set preemption=oldest-first
  pageglass simulate --session 3f2a --num-blocks 512 --num-blocks 1024
  pageglass simulate --trace azure-conv --speed 4 --set preemption=newest-first \\
      --set preemption=smallest-residual --num-blocks 600
  pageglass simulate --trace mooncake --costs 3f2a --set enable_prefix_caching=off

\b
The first column of a session is what was recorded, the second the simulation with the same settings: how far
they are apart is the simulator's error. A setting that is given several times makes a variant of each value.

\b
Settings: max_num_seqs, max_num_batched_tokens, max_waiting, enable_prefix_caching, policy, preemption,
preemption_mode, preemption_quantum, num_host_blocks, lookahead, and all others of the engine.

\b
first token      from arrival to the end of the step that gave it
output tok/s     per second in which there was something to do
recompute tax    share of all computed tokens that had been computed before a preemption
cache hits       share of the tokens of new requests that the prefix cache had

Exit code 0 if all went well, 2 for bad input, 130 after Ctrl-C.
"""


@dataclass(frozen=True, kw_only=True)
class SimulateSettings:
    """The options of the command, by their names."""

    session: str | None
    trace: str | None
    costs: str | None
    changes: tuple[str, ...]
    num_blocks: tuple[int, ...]
    limit: int | None
    speed: float
    scale: float | None
    as_json: bool
    data_dir: Path | None

    @property
    def all_changes(self) -> list[str]:
        """Everything that is to be different."""
        return [*self.changes, *(f"num_blocks={number}" for number in self.num_blocks)]


@click.command(help=HELP)
@click.option("--session", metavar="SID", help="A recorded session: its id, or how that begins.")
@trace_option
@click.option(
    "--costs",
    metavar="SID",
    help="Session to fit the costs of a step to; with --trace its settings count, too.  "
    "[default: the simulated session; for a trace the default model on two cores]",
)
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="NAME=VALUE",
    help="A setting to change; several times for more.",
)
@click.option(
    "--num-blocks", type=WholeNumber(min=1), multiple=True, metavar="N", help="Short for --set num_blocks=N."
)
@click.option("--limit", type=WholeNumber(min=1), metavar="N", help="First N requests.  [default: all]")
@speed_option
@scale_option
@click.option("--json", "as_json", is_flag=True, help="Print all figures as JSON.")
@data_dir_option
def simulate(**options: object) -> None:
    """Simulate a recorded session or a trace with other settings."""
    settings = SimulateSettings(**options)  # type: ignore[arg-type]  # click has checked the types
    if (settings.session is None) == (settings.trace is None):
        raise click.UsageError("Give exactly one of --session and --trace.")
    if settings.session is not None and settings.scale is not None:
        raise click.UsageError("--scale divides the lengths of a trace; a session has its own.")
    variants = parse_variants(settings.all_changes)
    line = ProgressLine()
    try:
        source = _read_source(settings, variants, line.update)
        comparison = compare(source, variants, line.update)
    finally:
        line.close()
    click.echo(_to_json(comparison) if settings.as_json else _to_text(comparison))


def _read_source(settings: SimulateSettings, variants: list[Changes], on_progress: OnProgress) -> Source:
    """Read what is simulated; settings are checked before, since reading takes its time."""
    options = LoadOptions(limit=settings.limit, speed=settings.speed)
    path = find_history_file(settings.data_dir)
    with explain_file_faults(path):
        of_costs = None if settings.costs is None else _open_session(path, settings.costs)
        session = None if settings.session is None else _open_session(path, settings.session)
        base = session or of_costs
        config = DEFAULT_CONFIG if base is None else base.config
        check_variants(config, variants)
        costs = None if of_costs is None else read_costs(of_costs, on_progress)
        if session is not None:
            return read_session(session, options, costs, on_progress)
    source = _read_trace(settings.trace or "", settings, options, config, costs or BUILT_IN_COSTS)
    return source if of_costs is None else replace(source, notes=[*notes_on_version(of_costs), *source.notes])


def _open_session(path: Path, name: str) -> SessionFile:
    if not path.exists():
        raise NotInHistoryError(f"No sessions in {path.parent}. Each run of pageglass serve records one.")
    check_revision(path)
    return open_session(path, name)


def _read_trace(
    name: str, settings: SimulateSettings, options: LoadOptions, config: Any, costs: Costs
) -> Source:
    path = Path(name).expanduser()
    if not path.exists() and name in SHIPPED_TRACES:
        path = data_file(SHIPPED_TRACES[name])
    if not path.is_file():
        raise LoadError(f"--trace {name}: there is no such file; shipped are: {', '.join(SHIPPED_TRACES)}.")
    trace = read_trace(path, settings.limit or sys.maxsize)
    title = f"trace {name} ({trace.format})"
    return make_source(trace, title, options, config=config, costs=costs, scale=settings.scale)


def _to_json(comparison: Comparison) -> str:
    document = msgspec.to_builtins(comparison)
    document["errors_percent"] = errors_percent(comparison)
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


def _to_text(comparison: Comparison) -> str:
    """Return the table with what has to be known about it."""
    runs = comparison.runs
    label_width = max(len(label) for label in _ROWS.values())
    widths = [max(_MIN_WIDTH, *(len(part) for part in _heads(run.name))) for run in runs]
    lines = [comparison.source, f"costs: {comparison.costs_source}", *comparison.notes, ""]
    num_head_lines = max(len(_heads(run.name)) for run in runs)
    for index in range(num_head_lines):
        heads = [_heads(run.name)[index:][:1] or [""] for run in runs]
        cells = [f"{head:>{width}}" for [head], width in zip(heads, widths, strict=True)]
        lines.append(" " * label_width + "  " + "  ".join(cells))
    figures = [msgspec.structs.asdict(run.figures) for run in runs]
    for name, label in _ROWS.items():
        cells = [f"{_show(row[name]):>{width}}" for row, width in zip(figures, widths, strict=True)]
        lines.append(f"{label:{label_width}}  " + "  ".join(cells))
    if errors := errors_percent(comparison):
        shown = [f"{_ROWS[name]} {error:+.1f} %" for name, error in errors.items()]
        lines += ["", f"error of the simulation as recorded: {', '.join(shown)}"]
    return "\n".join(line.rstrip() for line in lines)


def _heads(name: str) -> list[str]:
    """Return a column's head, a line for each setting."""
    return name.split(", ")


def _show(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"
