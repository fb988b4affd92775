"""Where the requests of a load come from: shipped files, files of the user, or a few numbers."""

import random
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from pathlib import Path

from app.load.files import LoadError, read_lines
from app.load.prompts import read_prompts
from app.load.synthetic import TokenSource
from app.load.traces import Trace, TraceFormat, TraceRow, read_trace
from app.load.workload import Body, Job, TraceOptions, Workload, arrival_s, prompt_workload, trace_workload

SHIPPED_TRACES = {"azure-conv": "azure-conv.csv", "mooncake": "mooncake.jsonl"}
SHIPPED_PROMPTS = {"mt-bench": "mt-bench.jsonl"}
"""Files in `app/data` by the names that users type."""

DEFAULT_SCALE = {TraceFormat.AZURE: 1.0, TraceFormat.MOONCAKE: 32.0}
"""What the lengths of a trace are divided by, so that a small model can follow it."""

Conversations = list[tuple[str, ...]]


class SourceKind(StrEnum):
    """What the rows of a file are."""

    TRACE = "trace"
    PROMPTS = "prompts"


@dataclass(frozen=True, kw_only=True)
class Generated:
    """Requests of equal lengths that arrive at random; lengths in tokens, the shared ones lead the prompt."""

    num_requests: int
    rate_per_s: float
    """On average; 0: all at once."""
    num_prompt_tokens: int
    num_shared_tokens: int
    num_answer_tokens: int


Source = Trace | Conversations | Generated


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """What a source becomes on one model; None where a server does not say. `scale` None: the default."""

    model: str
    max_model_len: int | None
    vocab_size: int | None
    speed: float = 1.0
    scale: float | None = None
    max_tokens: int = 128
    seed: int = 0
    ignore_eos: bool = True


def read_file(path: Path, max_rows: int) -> Trace | Conversations:
    """Read a trace or a list of prompts; which it is, its first line says. Raises `LoadError`."""
    kind = find_kind(path)
    return read_prompts(path, max_rows) if kind is SourceKind.PROMPTS else read_trace(path, max_rows)


def find_kind(path: Path) -> SourceKind:
    """Return what the rows of a file seem to be."""
    _, line = next(read_lines(path), (0, ""))
    return SourceKind.PROMPTS if line.startswith("{") and '"turns"' in line else SourceKind.TRACE


def make_workload(source: Source, options: WorkloadOptions) -> Workload:
    """Return the requests; raises `LoadError` where synthetic tokens need facts that the server hides."""
    if isinstance(source, list):
        return prompt_workload(source, options.model, options.max_tokens)
    if options.max_model_len is None or options.vocab_size is None:
        raise LoadError(
            "The server does not tell max_model_len and vocab_size, which synthetic prompts need; "
            "use --prompts, or a Pageglass server."
        )
    scale = options.scale or (DEFAULT_SCALE[source.format] if isinstance(source, Trace) else 1.0)
    trace_options = TraceOptions(
        model=options.model,
        max_model_len=options.max_model_len,
        vocab_size=options.vocab_size,
        scale=scale,
        speed=options.speed,
        seed=options.seed,
        ignore_eos=options.ignore_eos,
    )
    if isinstance(source, Trace):
        return trace_workload(source, trace_options)
    return _generated_workload(source, trace_options)


def repeat(workload: Workload, num_copies: int) -> Workload:
    """Return a workload in which each job comes so many times at once, with the same prompts."""
    if num_copies == 1:
        return workload
    num_prompt_tokens = workload.num_prompt_tokens
    return Workload(
        [job for job in workload.jobs for _ in range(num_copies)],
        num_output_tokens=workload.num_output_tokens * num_copies,
        num_prompt_tokens=None if num_prompt_tokens is None else num_prompt_tokens * num_copies,
        num_skipped=workload.num_skipped * num_copies,
    )


def _generated_workload(source: Generated, options: TraceOptions) -> Workload:
    tokens = TokenSource(options.vocab_size, options.seed, 1.0)
    num_tokens = source.num_prompt_tokens + source.num_answer_tokens
    if num_tokens > options.max_model_len:
        return Workload([], num_skipped=source.num_requests)
    draw = random.Random(options.seed)  # noqa: S311 - arrival times of a test load
    rate = source.rate_per_s
    gaps_s = (draw.expovariate(rate) if rate else 0.0 for _ in range(source.num_requests))
    jobs = [
        _generated_job(source, tokens, index, arrival_s(moment_s, options.speed), options)
        for index, moment_s in enumerate(accumulate(gaps_s))
    ]
    return Workload(
        jobs,
        num_output_tokens=source.num_answer_tokens * len(jobs),
        num_prompt_tokens=source.num_prompt_tokens * len(jobs),
    )


def _generated_job(
    source: Generated, tokens: TokenSource, index: int, moment_s: float, options: TraceOptions
) -> Job:
    num_shared = min(source.num_shared_tokens, source.num_prompt_tokens)
    row = TraceRow(moment_s, source.num_prompt_tokens - num_shared, source.num_answer_tokens, None)

    def make_body(_answers: object) -> Body:
        own = tokens.prompt(row, index) if row.num_prompt_tokens else []
        return {
            "model": options.model,
            "prompt": tokens.draw("shared", num_shared) + own,
            "max_tokens": source.num_answer_tokens,
            "temperature": 0,
            "ignore_eos": options.ignore_eos,
        }

    return Job(moment_s, "/v1/completions", 1, make_body)
