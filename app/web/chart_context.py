"""What the charts over a session need: where their numbers are, and the same numbers as a table."""

import time

import msgspec

from app.errors import HistoryUnavailableError, NotInHistoryError
from app.services.metric_rows import MetricSpan
from app.services.requests import RequestReader
from app.services.sessions import SessionReader
from app.web.templating import NO_VALUE, format_count, format_percent

POINTS = 300
"""Of a chart and its table; `static/js/charts.js` asks for as many."""

SETTLING_S = 2.0
"""A second of a running session is complete and written so long after its end."""

_NS_PER_S = 1_000_000_000
_NS_PER_MS = 1e6


class ChartRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table: rates per second of a span, the most that ran and waited, blocks at its end."""

    start_ns: int
    prefill_rate: str
    decode_rate: str
    running: str
    waiting: str
    used: str
    cached: str
    ttft: str
    last_step: int


class Charts(msgspec.Struct, frozen=True, kw_only=True):
    """The charts of one session; `problem`: why there are no numbers, else empty. `started_ns`: 0 then."""

    session_id: str
    started_ns: int
    is_running: bool
    width_s: int
    rows: list[ChartRow]
    problem: str


def complete_until(*, is_running: bool) -> float:
    """Return up to which Unix time, in seconds, the metrics of a session do not change any more."""
    return time.time() - SETTLING_S if is_running else float("inf")


async def make_charts(
    requests: RequestReader, sessions: SessionReader, session_id: str, *, is_running: bool
) -> Charts:
    """Return the charts of a session; says in `problem` why the history cannot be read."""
    try:
        info = await sessions.facts(session_id)
        metrics = await requests.metrics(session_id, None, None, POINTS)
    except (HistoryUnavailableError, NotInHistoryError) as error:
        return Charts(
            session_id=session_id,
            started_ns=0,
            is_running=is_running,
            width_s=1,
            rows=[],
            problem=str(error),
        )
    end = complete_until(is_running=is_running)
    return Charts(
        session_id=session_id,
        started_ns=info.started_ns,
        is_running=is_running,
        width_s=metrics.width_s,
        rows=[
            _make_row(span, metrics.width_s) for span in metrics.spans if span.second + metrics.width_s <= end
        ],
        problem="",
    )


def _make_row(span: MetricSpan, width_s: int) -> ChartRow:
    num_blocks = span.num_free + span.num_cached + span.num_used
    ttft_ms = span.ttft_ns / span.num_ttft / _NS_PER_MS if span.num_ttft else None
    return ChartRow(
        start_ns=span.second * _NS_PER_S,
        prefill_rate=format_count(span.num_prefill_tokens / width_s),
        decode_rate=format_count(span.num_decode_tokens / width_s),
        running=format_count(span.max_running),
        waiting=format_count(span.max_waiting),
        used=format_percent(span.num_used, num_blocks),
        cached=format_percent(span.num_cached, num_blocks),
        ttft=f"{format_count(ttft_ms)} ms" if ttft_ms is not None else NO_VALUE,
        last_step=span.last_step,
    )
