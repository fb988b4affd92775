"""Queries on the per-second sums of a session, merged into as many spans as a chart can show."""

import msgspec
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.models import METRIC_MAXIMA, METRIC_NEWEST, METRIC_SUMS, MetricRow


class MetricSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Sums of the seconds [`second`, `second` + width) of Unix time; the other fields as in `MetricRow`."""

    second: int
    num_steps: int
    step_ns: int
    max_step_ns: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_hit_tokens: int
    num_lookup_tokens: int
    num_arrived: int
    num_finished: int
    num_preemptions: int
    num_evictions: int
    ttft_ns: int
    num_ttft: int
    max_ttft_ns: int
    last_step: int
    num_running: int
    num_waiting: int
    max_running: int
    max_waiting: int
    num_free: int
    num_cached: int
    num_used: int


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """Spans of `width_s` seconds in order; spans without a step are left out."""

    width_s: int
    spans: list[MetricSpan]


async def read_metrics(
    db: AsyncSession, session_id: str, first_second: int | None, end_second: int | None, points: int
) -> Metrics:
    """Return the seconds in [first_second, end_second), merged into at most `points` spans."""
    extent = select(func.min(MetricRow.second), func.max(MetricRow.second)).where(
        MetricRow.session_id == session_id
    )
    bounds = (await db.execute(extent)).one()
    first: int | None = bounds[0]
    last: int | None = bounds[1]
    if first is None or last is None:
        return Metrics(width_s=1, spans=[])
    first = first if first_second is None else max(first, first_second)
    last = last if end_second is None else min(last, end_second - 1)
    if last < first:
        return Metrics(width_s=1, spans=[])
    width = _choose_width(first, last, points)
    number = MetricRow.second // width
    merged = (
        select(
            number.label("number"),
            func.max(MetricRow.second).label("newest"),
            *(func.sum(getattr(MetricRow, name)).label(name) for name in METRIC_SUMS),
            *(func.max(getattr(MetricRow, name)).label(name) for name in METRIC_MAXIMA),
        )
        .where(MetricRow.session_id == session_id, MetricRow.second.between(first, last))
        .group_by(number)
        .subquery()
    )
    columns = [merged.c[name] for name in (*METRIC_SUMS, *METRIC_MAXIMA)]
    query = (
        select(merged.c.number, *columns, *(getattr(MetricRow, name) for name in METRIC_NEWEST))
        .join(merged, (MetricRow.second == merged.c.newest) & (MetricRow.session_id == session_id))
        .order_by(merged.c.number)
    )
    names = (*METRIC_SUMS, *METRIC_MAXIMA, *METRIC_NEWEST)
    spans = [
        MetricSpan(second=values[0] * width, **dict(zip(names, values[1:], strict=True)))
        for values in await db.execute(query)
    ]
    return Metrics(width_s=width, spans=spans)


def _choose_width(first: int, last: int, points: int) -> int:
    """Return the width in seconds of spans that begin at its multiples; `points` is 2 or more."""
    if last - first < points:
        return 1
    return -(-(last - first) // (points - 1))
