"""What is sent: jobs with an arrival time, made from a trace or from prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from app.load.synthetic import TokenSource
from app.load.traces import Trace, TraceRow

Body = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """Requests of one client, sent one after another; each may use the answers before it."""

    arrival_s: float
    path: str
    num_requests: int
    make_body: Callable[[Sequence[str]], Body]
    """From the answers so far to the body of the next request."""
    priority: str | None = None
    """Its class, empty for none; None where the load has no classes."""


@dataclass(frozen=True)
class Workload:
    """Jobs in order of arrival, and how many rows are left out because they outgrow the context."""

    jobs: list[Job]
    num_output_tokens: int = 0
    """At most so many: answers may end earlier."""
    num_prompt_tokens: int | None = None
    """None where only the server can count them."""
    num_skipped: int = 0

    @property
    def num_requests(self) -> int:
        """Requests that will be sent."""
        return sum(job.num_requests for job in self.jobs)


@dataclass(frozen=True)
class TraceOptions:
    """How the rows of a trace become requests."""

    model: str
    max_model_len: int
    vocab_size: int
    scale: float
    speed: float
    seed: int
    ignore_eos: bool


def arrival_s(recorded_s: float, speed: float) -> float:
    """Return when to send a request, in seconds from the start; speed 0 means at once."""
    return recorded_s / speed if speed else 0.0


def trace_workload(trace: Trace, options: TraceOptions) -> Workload:
    """Return one completion request with token ids per row that fits into the context."""
    source = TokenSource(options.vocab_size, options.seed, options.scale)
    fitting = [
        (index, row)
        for index, row in enumerate(trace.rows)
        if source.num_prompt_tokens(row) + source.num_output_tokens(row) <= options.max_model_len
    ]
    jobs = [_trace_job(source, index, row, options) for index, row in fitting]
    return Workload(
        jobs,
        num_output_tokens=sum(source.num_output_tokens(row) for _, row in fitting),
        num_prompt_tokens=sum(source.num_prompt_tokens(row) for _, row in fitting),
        num_skipped=len(trace.rows) - len(jobs),
    )


def prompt_workload(conversations: Sequence[tuple[str, ...]], model: str, max_tokens: int) -> Workload:
    """Return one job per conversation: its turns, each with the answers before it, all due at once."""
    jobs = [_prompt_job(turns, model, max_tokens) for turns in conversations]
    return Workload(jobs, num_output_tokens=max_tokens * sum(job.num_requests for job in jobs))


def _trace_job(source: TokenSource, index: int, row: TraceRow, options: TraceOptions) -> Job:
    def make_body(_answers: Sequence[str]) -> Body:
        return {
            "model": options.model,
            "prompt": source.prompt(row, index),
            "max_tokens": source.num_output_tokens(row),
            "temperature": 0,
            "ignore_eos": options.ignore_eos,
        }

    return Job(arrival_s(row.arrival_s, options.speed), "/v1/completions", 1, make_body)


def _prompt_job(turns: Sequence[str], model: str, max_tokens: int) -> Job:
    def make_body(answers: Sequence[str]) -> Body:
        messages = []
        for question, answer in zip(turns, answers, strict=False):
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": turns[len(answers)]})
        return {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}

    return Job(0.0, "/v1/chat/completions", len(turns), make_body)
