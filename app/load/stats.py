"""Counting a load run, and the words for it."""

import math
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from app.load.client import Outcome
from app.load.workload import Workload

_LABEL_WIDTH = 22


NO_CLASS = "no class"


@dataclass
class ClassStats:
    """The requests of one priority class."""

    num_finished: int = 0
    ttft_s: "array[float]" = field(default_factory=lambda: array("d"))

    @property
    def mean_ttft_s(self) -> float | None:
        """Mean time to the first token, None before there is one."""
        return sum(self.ttft_s) / len(self.ttft_s) if self.ttft_s else None


@dataclass
class LoadStats:
    """Counts and times of one run; a request is in exactly one of the counts."""

    num_planned: int = 0
    num_running: int = 0
    num_finished: int = 0
    num_skipped: int = 0
    num_cut_off: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    num_pieces: int = 0
    num_output_tokens: int = 0
    elapsed_s: float = 0.0
    ttft_s: "array[float]" = field(default_factory=lambda: array("d"))
    gaps_s: "array[float]" = field(default_factory=lambda: array("d"))
    by_class: dict[str, ClassStats] = field(default_factory=dict)
    """By name of the priority class, `NO_CLASS` for the others; empty where the load has no classes."""

    @property
    def num_failed(self) -> int:
        """Requests that ended with an error."""
        return self.errors.total()

    @property
    def num_not_sent(self) -> int:
        """Requests whose turn never came."""
        ended = self.num_finished + self.num_failed + self.num_skipped + self.num_cut_off
        return self.num_planned - ended - self.num_running

    def add(self, outcome: Outcome, priority: str | None = None) -> None:
        """Count a request that has ended; `priority` as in `Job`."""
        if outcome.is_over_context:
            self.num_skipped += 1
        elif outcome.error is not None:
            self.errors[outcome.error] += 1
        else:
            self.num_finished += 1
        self.num_output_tokens += outcome.num_output_tokens
        if outcome.ttft_s is not None:
            self.ttft_s.append(outcome.ttft_s)
        self.gaps_s.extend(outcome.gaps_s)
        if priority is not None:
            of_class = self.by_class.setdefault(priority or NO_CLASS, ClassStats())
            of_class.num_finished += outcome.error is None
            if outcome.ttft_s is not None:
                of_class.ttft_s.append(outcome.ttft_s)


def start_text(workload: Workload, server: str) -> str:
    """Return in one line what is about to be sent to `server`, so that people can judge how long it takes."""
    requests = _counted(workload.num_requests, "request")
    answers = f"up to {_counted(workload.num_output_tokens, 'output token')}"
    if workload.num_prompt_tokens is not None:
        answers = f"{_counted(workload.num_prompt_tokens, 'prompt token')} and {answers}"
    skipped = f"; {workload.num_skipped:,} skipped, longer than the context" if workload.num_skipped else ""
    return f"{requests} with {answers} to {server}{skipped}"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def progress_text(stats: LoadStats, tokens_per_s: float) -> str:
    """Return the state of a run in one line."""
    return (
        f"open {stats.num_running}, finished {stats.num_finished}, failed {stats.num_failed}, "
        f"skipped {stats.num_skipped} of {stats.num_planned}, {tokens_per_s:.1f} tok/s"
    )


def percentile(values: Iterable[float], percent: float) -> float | None:
    """Return the nearest-rank percentile, None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def summary_lines(stats: LoadStats) -> list[str]:
    """Return the table at the end of a run."""
    errors = ", ".join(f"{count} x {error}" for error, count in stats.errors.most_common())
    rows = [
        ("finished", str(stats.num_finished)),
        ("failed", f"{stats.num_failed}  ({errors})" if errors else "0"),
        ("skipped", f"{stats.num_skipped}  (over the context)" if stats.num_skipped else "0"),
    ]
    if stats.num_cut_off or stats.num_not_sent:
        rows.append(("stopped", f"{stats.num_cut_off} cut off, {stats.num_not_sent} not sent"))
    rate = stats.num_output_tokens / stats.elapsed_s if stats.elapsed_s else 0.0
    rows += [
        ("time to first token", _percentiles_text(stats.ttft_s)),
        ("between tokens", _percentiles_text(stats.gaps_s)),
        ("output", f"{stats.num_output_tokens} tokens in {stats.elapsed_s:.1f} s, {rate:.1f} tok/s"),
    ]
    rows += [(name, _class_text(of_class)) for name, of_class in sorted(stats.by_class.items())]
    return [f"{label:{_LABEL_WIDTH}}{value}" for label, value in rows]


def _class_text(of_class: ClassStats) -> str:
    mean, p99 = of_class.mean_ttft_s, percentile(of_class.ttft_s, 99)
    times = "-" if mean is None or p99 is None else f"mean {mean * 1000:.1f} ms, p99 {p99 * 1000:.1f} ms"
    return f"{of_class.num_finished} finished, first token {times}"


def _percentiles_text(values_s: Iterable[float]) -> str:
    ordered = sorted(values_s)
    p50, p99 = percentile(ordered, 50), percentile(ordered, 99)
    if p50 is None or p99 is None:
        return "-"
    return f"p50 {p50 * 1000:.1f} ms, p99 {p99 * 1000:.1f} ms"
