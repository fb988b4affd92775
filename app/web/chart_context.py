"""What the charts over a session need: where their numbers are, and the same numbers as a short table."""

import msgspec

from app.errors import HistoryUnavailableError, NotInHistoryError
from app.services.metric_rows import MetricSpan
from app.services.requests import RequestReader
from app.web.templating import NO_VALUE, format_count, format_percent

TABLE_POINTS = 12

_NS_PER_S = 1_000_000_000
_NS_PER_MS = 1e6


class ChartRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table; rates per second of the span, counts after its last step."""

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
    """The charts of one session; `problem`: why there are no numbers, else empty."""

    session_id: str
    is_running: bool
    width_s: int
    rows: list[ChartRow]
    problem: str


async def make_charts(requests: RequestReader, session_id: str, *, is_running: bool) -> Charts:
    """Return the charts of a session; says in `problem` why the history cannot be read."""
    try:
        metrics = await requests.metrics(session_id, None, None, TABLE_POINTS)
    except (HistoryUnavailableError, NotInHistoryError) as error:
        return Charts(session_id=session_id, is_running=is_running, width_s=1, rows=[], problem=str(error))
    return Charts(
        session_id=session_id,
        is_running=is_running,
        width_s=metrics.width_s,
        rows=[_make_row(span, metrics.width_s) for span in metrics.spans],
        problem="",
    )


def _make_row(span: MetricSpan, width_s: int) -> ChartRow:
    num_blocks = span.num_free + span.num_cached + span.num_used
    ttft_ms = span.ttft_ns / span.num_ttft / _NS_PER_MS if span.num_ttft else None
    return ChartRow(
        start_ns=span.second * _NS_PER_S,
        prefill_rate=format_count(span.num_prefill_tokens / width_s),
        decode_rate=format_count(span.num_decode_tokens / width_s),
        running=format_count(span.num_running),
        waiting=format_count(span.num_waiting),
        used=format_percent(span.num_used, num_blocks),
        cached=format_percent(span.num_cached, num_blocks),
        ttft=f"{format_count(ttft_ms)} ms" if ttft_ms is not None else NO_VALUE,
        last_step=span.last_step,
    )
