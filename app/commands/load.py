"""`pageglass load`: push the requests of a trace, or a list of prompts, at a running server."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import click

from app.commands.options import WholeNumber, scale_option, speed_option, trace_option
from app.commands.progress import ProgressLine
from app.load.client import LoadClient, ServerInfo
from app.load.files import LoadError
from app.load.priorities import PriorityMix, assign_priorities, parse_mix
from app.load.prompts import read_prompts
from app.load.runner import LoadRun, report_progress
from app.load.sources import SHIPPED_PROMPTS, SHIPPED_TRACES, Conversations, WorkloadOptions, make_workload
from app.load.stats import LoadStats, progress_text, start_text, summary_lines
from app.load.traces import Trace, read_trace
from app.load.workload import Workload
from app.resources import data_file

_SHIPPED = {"--trace": SHIPPED_TRACES, "--prompts": SHIPPED_PROMPTS}
"""Files of each option by name."""

_EXIT_FAILED = 1
_EXIT_INTERRUPTED = 130


class _Seed(click.types.IntParamType):
    name = "whole number"


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """The options of the command, by their names."""

    trace: str | None
    prompts: str | None
    url: str
    rows: int
    speed: float
    scale: float | None
    max_tokens: int
    concurrency: int
    seed: int
    priority: str
    api_key: str | None
    model: str | None
    ignore_eos: bool


@click.command()
@trace_option
@click.option("--prompts", metavar="FILE", help="MT-bench JSONL, or: mt-bench.")
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="Base URL of the server.")
@click.option(
    "--rows", type=WholeNumber(min=1), metavar="N", default=100, show_default=True, help="First N rows."
)
@speed_option
@scale_option
@click.option(
    "--max-tokens",
    type=WholeNumber(min=1),
    metavar="N",
    default=128,
    show_default=True,
    help="Longest answer to a prompt.",
)
@click.option(
    "--concurrency",
    type=WholeNumber(min=1, max=4096),
    metavar="N",
    default=64,
    show_default=True,
    help="Most requests open at once.",
)
@click.option(
    "--seed",
    type=_Seed(),
    metavar="N",
    default=0,
    show_default=True,
    help="Seed of the synthetic tokens.",
)
@click.option(
    "--priority",
    metavar="MIX",
    default="",
    help="Shares of the server's priority classes, such as premium=0.2,bulk=0.3; the rest has none.",
)
@click.option("--api-key", help="Key for a server that asks for one.")
@click.option("--model", help="Name of the model.  [default: the first one of the server]")
@click.option(
    "--ignore-eos/--no-ignore-eos",
    default=True,
    show_default=True,
    help="Answers to a trace get their recorded length even if the model would stop.",
)
def load(**options: object) -> None:
    """Push requests at a running server and report how it coped.

    A trace gives arrival times and lengths; the texts are synthetic, with the sharing of the trace.
    Exit code 0 if all went well, 1 if requests failed, 2 for bad input, 130 after Ctrl-C.
    """
    settings = LoadSettings(**options)  # type: ignore[arg-type]  # click has checked the types
    if (settings.trace is None) == (settings.prompts is None):
        raise click.UsageError("Give exactly one of --trace and --prompts.")
    parse_mix(settings.priority)  # before anything is read or sent
    stats = asyncio.run(_run(settings, _read_input(settings)))
    for line in summary_lines(stats):
        click.echo(line)
    if stats.num_cut_off or stats.num_not_sent:
        raise click.exceptions.Exit(_EXIT_INTERRUPTED)
    if stats.num_failed:
        raise click.exceptions.Exit(_EXIT_FAILED)


def _read_input(settings: LoadSettings) -> Trace | Conversations:
    if settings.trace is not None:
        return read_trace(_find_file("--trace", settings.trace), settings.rows)
    return read_prompts(_find_file("--prompts", settings.prompts or ""), settings.rows)


def _find_file(option: str, name: str) -> Path:
    """Return the path of a file given by its path or by the name of a shipped one."""
    path = Path(name).expanduser()
    shipped = _SHIPPED[option]
    if path.is_dir():
        raise LoadError(
            f"{option} {name}: this is a folder, expected is a file or one of {', '.join(shipped)}."
        )
    if path.exists():
        return path
    if name in shipped:
        return data_file(shipped[name])
    for other, names in _SHIPPED.items():
        if name in names:
            raise LoadError(f"{name} is for {other}, not for {option}: pageglass load {other} {name}")
    raise LoadError(f"There is no file {name!r}; shipped are: {', '.join(shipped)}.")


async def _run(settings: LoadSettings, source: Trace | Conversations) -> LoadStats:
    async with LoadClient(settings.url, concurrency=settings.concurrency, api_key=settings.api_key) as client:
        info = await client.server_info(settings.model)
        await _check_classes(client, parse_mix(settings.priority))
        workload = _make_workload(settings, source, info)
        run = LoadRun(workload, client.send, concurrency=settings.concurrency)
        click.echo(start_text(workload, f"{client.url}, model {info.model}"), err=True)
        line = ProgressLine()
        reporting = asyncio.create_task(
            report_progress(run.stats, lambda stats, rate: line.update(progress_text(stats, rate)))
        )
        try:
            return await run.run()
        finally:
            reporting.cancel()
            line.close()


async def _check_classes(client: LoadClient, mix: PriorityMix) -> None:
    """Refuse a class that the server does not know: all its requests would be refused."""
    known = await client.priority_classes() if mix else None
    for name, _ in mix:
        if known is not None and name not in known:
            raise LoadError(f"--priority: the server has no class {name} (it has: {', '.join(known)}).")


def _make_workload(settings: LoadSettings, source: Trace | Conversations, info: ServerInfo) -> Workload:
    options = WorkloadOptions(
        model=info.model,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        scale=settings.scale,
        speed=settings.speed,
        max_tokens=settings.max_tokens,
        seed=settings.seed,
        ignore_eos=settings.ignore_eos,
    )
    return assign_priorities(make_workload(source, options), parse_mix(settings.priority))
