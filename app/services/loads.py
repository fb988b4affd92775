"""Pushing load at the running engine from within: one run at a time, watched and stopped by people."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import msgspec

from app.engine_host import EngineHost, HostStatus
from app.errors import UnavailableError, describe_error
from app.history.request_info import KIND_LOAD
from app.load.client import Outcome
from app.load.files import LoadError
from app.load.histogram import Histogram
from app.load.priorities import PriorityMix, assign_priorities
from app.load.prompts import read_prompts
from app.load.runner import LoadRun, report_progress
from app.load.sources import (
    SHIPPED_PROMPTS,
    SHIPPED_TRACES,
    Generated,
    Source,
    WorkloadOptions,
    make_workload,
    read_file,
    repeat,
)
from app.load.stats import LoadStats, percentile
from app.load.traces import read_trace
from app.load.workload import Body, Workload
from app.resources import data_file
from app.services.generation import Generation, GenerationService, GenerationSpec
from app.services.priorities import Priorities
from engine.errors import ContextLengthError, EngineError
from engine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

MAX_SHOWN_ERRORS = 8

OnToken = Callable[[], None]


class LoadBusyError(LoadError):
    """A run is going on; there is one at a time."""


@dataclass(frozen=True, kw_only=True)
class Upload:
    """A file of the user: a trace or a list of prompts."""

    name: str
    content: bytes


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """What to send. `source` is the name of a shipped file, a file, or numbers.

    `speed`, `scale`, `max_tokens`, `seed` and `ignore_eos` are as in `WorkloadOptions`; of a file at most
    `max_rows` rows are sent, each `num_copies` times, and no more than `concurrency` requests at once.
    `priorities` are shares of priority classes.
    `typed` is the form that it came from, to be shown again.
    """

    title: str
    source: str | Upload | Generated
    max_rows: int = 100
    speed: float = 1.0
    scale: float | None = None
    max_tokens: int = 128
    num_copies: int = 1
    concurrency: int = 64
    seed: int = 0
    ignore_eos: bool = True
    priorities: PriorityMix = ()
    typed: Mapping[str, str] = field(default_factory=dict)


class Spread(msgspec.Struct, frozen=True):
    """Two percentiles in seconds, None before there are values."""

    p50_s: float | None
    p95_s: float | None


class ClassView(msgspec.Struct, frozen=True, kw_only=True):
    """How it goes for one priority class; times to the first token, None before there is one."""

    name: str
    num_finished: int
    mean_s: float | None
    p99_s: float | None


class LoadView(msgspec.Struct, frozen=True, kw_only=True):
    """How a run goes, or went. `state`: running, stopping, finished, stopped, failed.

    `num_sent` requests are under way or have ended; `tokens_per_s` is the rate of the last second, and of
    the whole run once it has ended. `errors` are the most frequent ones with their numbers.
    """

    title: str
    state: str
    reason: str
    num_planned: int
    num_sent: int
    num_running: int
    num_finished: int
    num_failed: int
    num_skipped: int
    num_cut_off: int
    num_not_sent: int
    num_tokens: int
    tokens_per_s: float
    elapsed_s: float
    started_ns: int
    ttft: Spread
    between: Spread
    errors: list[tuple[str, int]]
    classes: list[ClassView]

    @property
    def is_active(self) -> bool:
        """Whether the run goes on."""
        return self.state in {"running", "stopping"}

    @property
    def num_done(self) -> int:
        """Requests that came to their own end."""
        return self.num_finished + self.num_failed + self.num_skipped


@dataclass(frozen=True)
class _Times:
    """Of all requests, also of those that have not ended."""

    ttft: Histogram = field(default_factory=Histogram)
    between: Histogram = field(default_factory=Histogram)


@dataclass
class _Run:
    plan: LoadPlan
    load: LoadRun
    times: _Times
    started_ns: int = field(default_factory=time.time_ns)
    started_s: float = field(default_factory=time.perf_counter)
    rate: float = 0.0
    state: str = "running"
    reason: str = ""
    task: "asyncio.Task[None] | None" = None

    def note_rate(self, _: LoadStats, rate: float) -> None:
        self.rate = rate


class LoadService:
    """Lives on the event loop. The last run's figures stay until the next one."""

    def __init__(self, host: EngineHost, generations: GenerationService, priorities: Priorities) -> None:
        """Send to the engine of `host` through `generations`, as clients of the API do, without HTTP."""
        self._host = host
        self._generations = generations
        self._priorities = priorities
        self._run: _Run | None = None
        self._is_starting = False
        host.add_status_listener(self._on_status)

    @property
    def last_plan(self) -> LoadPlan | None:
        """What the last run sends or sent."""
        return None if self._run is None else self._run.plan

    @property
    def priority_classes(self) -> tuple[str, ...]:
        """Names that priorities may have."""
        return self._priorities.names

    @property
    def is_active(self) -> bool:
        """Whether a run goes on."""
        return self._run is not None and self._run.task is not None and not self._run.task.done()

    async def start(self, plan: LoadPlan) -> None:
        """Begin a run.

        Raises `LoadBusyError` while one goes on, `LoadError` naming what is wrong with the source, and
        `UnavailableError` if the engine takes no requests.
        """
        if self.is_active or self._is_starting:
            raise LoadBusyError("A load is running; stop it, or wait for its end.")
        self._host.check_available()
        self._is_starting = True
        try:
            workload = await self._generations.call_text_worker(partial(self._prepare, plan))
        finally:
            self._is_starting = False
        times = _Times()
        load = LoadRun(workload, partial(self._send, times), concurrency=plan.concurrency)
        run = self._run = _Run(plan, load, times)
        run.task = asyncio.create_task(self._execute(run))
        logger.info("Load %r begins: %d requests", plan.title, workload.num_requests)

    def stop(self, reason: str = "") -> None:
        """End the run with its figures so far. Safe to repeat, and without a run."""
        run = self._run
        if run is not None and run.task is not None and self.is_active and run.state == "running":
            run.state, run.reason = "stopping", reason
            run.task.cancel()

    async def close(self) -> None:
        """End the run for good, before the engine stops."""
        self.stop("The server is shutting down.")
        if self._run is not None and self._run.task is not None:
            await asyncio.gather(self._run.task, return_exceptions=True)

    def describe(self) -> LoadView | None:
        """Return how the run goes, or went; None before the first one."""
        run = self._run
        if run is None:
            return None
        stats = run.load.stats
        elapsed_s = stats.elapsed_s if not self.is_active else time.perf_counter() - run.started_s
        rate = run.rate if self.is_active else stats.num_pieces / max(elapsed_s, 1e-9)
        return LoadView(
            title=run.plan.title,
            state=run.state,
            reason=run.reason,
            num_planned=stats.num_planned,
            num_sent=stats.num_planned - stats.num_not_sent - stats.num_skipped,
            num_running=stats.num_running,
            num_finished=stats.num_finished,
            num_failed=stats.num_failed,
            num_skipped=stats.num_skipped,
            num_cut_off=stats.num_cut_off,
            num_not_sent=stats.num_not_sent,
            num_tokens=stats.num_pieces,
            tokens_per_s=rate,
            elapsed_s=elapsed_s,
            started_ns=run.started_ns,
            ttft=_spread(run.times.ttft),
            between=_spread(run.times.between),
            errors=stats.errors.most_common(MAX_SHOWN_ERRORS),
            classes=_describe_classes(stats),
        )

    def _on_status(self) -> None:
        """Do not keep a server from stopping."""
        if self._host.status is HostStatus.DRAINING:
            self.stop("The server is shutting down.")

    async def _execute(self, run: _Run) -> None:
        reporting = asyncio.create_task(report_progress(run.load.stats, run.note_rate))
        try:
            await run.load.run()  # ends early, and in order, when it is cancelled
            run.state = "finished" if run.state == "running" else "stopped"
        except Exception:
            logger.exception("The load failed")
            run.state, run.reason = "failed", "The load failed; the log says why."
        finally:
            reporting.cancel()
            logger.info("Load %r %s", run.plan.title, run.state)

    def _prepare(self, plan: LoadPlan) -> Workload:
        """Read the source and lay out its requests; runs off the event loop."""
        config, tokenizer = self._host.config, self._host.tokenizer
        options = WorkloadOptions(
            model=self._host.model_name,
            max_model_len=None if config is None else config.max_model_len,
            vocab_size=None if tokenizer is None else tokenizer.vocab_size,
            speed=plan.speed,
            scale=plan.scale,
            max_tokens=plan.max_tokens,
            seed=plan.seed,
            ignore_eos=plan.ignore_eos,
        )
        workload = repeat(make_workload(_read(plan), options), plan.num_copies)
        workload = assign_priorities(workload, plan.priorities)
        if not workload.jobs:
            raise LoadError(
                f"None of the {workload.num_skipped:,} requests fits into the context of "
                f"{options.max_model_len:,} tokens; take shorter ones, or a larger scale."
            )
        return workload

    async def _send(self, times: _Times, _path: str, body: Body, on_token: OnToken) -> Outcome:
        """Answer one request; what fails is in the outcome."""
        outcome = Outcome()
        try:
            async with self._host.preparing():
                generation = await self._generations.start(self._make_spec(body))
            try:
                await _follow(generation, outcome, times, on_token)
            finally:
                outcome.num_output_tokens = generation.make_usage().completion_tokens
                generation.close()
        except EngineError as error:
            outcome.error = describe_error(error).code
            outcome.is_over_context = isinstance(error, ContextLengthError)
            if isinstance(error, UnavailableError):
                self.stop(str(error))
        return outcome

    def _make_spec(self, body: Body) -> GenerationSpec:
        fields: dict[str, Any] = {
            "messages": body.get("messages"),
            "prompts": [body["prompt"]] if "prompt" in body else None,
        }
        return GenerationSpec(
            request_id=f"load-{uuid4().hex}",
            sampling_params=SamplingParams(
                max_tokens=body["max_tokens"],
                temperature=body["temperature"],
                ignore_eos=body.get("ignore_eos", False),
            ),
            kind=KIND_LOAD,
            priority=self._priorities.find(body.get("priority")),
            **fields,
        )


def _describe_classes(stats: LoadStats) -> list[ClassView]:
    return [
        ClassView(
            name=name,
            num_finished=of_class.num_finished,
            mean_s=of_class.mean_ttft_s,
            p99_s=percentile(of_class.ttft_s, 99),
        )
        for name, of_class in sorted(stats.by_class.items())
    ]


def _spread(times: Histogram) -> Spread:
    return Spread(times.percentile(50), times.percentile(95))


async def _follow(generation: Generation, outcome: Outcome, times: _Times, on_token: OnToken) -> None:
    """Read an answer to its end, with the times of its pieces."""
    started = last = time.perf_counter()
    num_tokens = 0
    pieces: list[str] = []
    while deltas := await generation.next_deltas():
        now = time.perf_counter()
        if outcome.ttft_s is None:
            outcome.ttft_s = now - started
            times.ttft.add(outcome.ttft_s)
        else:
            times.between.add(now - last)
        last = now
        pieces += [delta.text for delta in deltas]
        num_known, num_tokens = num_tokens, generation.make_usage().completion_tokens
        for _ in range(num_tokens - num_known):
            on_token()
    outcome.text = "".join(pieces)


def _read(plan: LoadPlan) -> Source:
    match plan.source:
        case Generated():
            return plan.source
        case Upload():
            return _read_upload(plan.source, plan.max_rows)
        case str(name) if name in SHIPPED_TRACES:
            return read_trace(data_file(SHIPPED_TRACES[name]), plan.max_rows)
        case str(name) if name in SHIPPED_PROMPTS:
            return read_prompts(data_file(SHIPPED_PROMPTS[name]), plan.max_rows)
    raise LoadError(f"There is no source {plan.source!r}.")


def _read_upload(upload: Upload, max_rows: int) -> Source:
    with TemporaryDirectory(prefix="pageglass-load-") as folder:
        path = Path(folder) / "upload"
        path.write_bytes(upload.content)
        try:
            return read_file(path, max_rows)
        except LoadError as error:
            raise LoadError(str(error).replace(str(path), upload.name)) from None
