import random

from app.load.histogram import Histogram
from app.load.stats import percentile


def test_percentiles_are_right_to_one_percent() -> None:
    draw = random.Random(1)
    times = [draw.lognormvariate(-4, 2) for _ in range(5000)]
    histogram = Histogram()
    for time_s in times:
        histogram.add(time_s)

    for percent in (1, 50, 95, 99, 100):
        expected = percentile(times, percent)
        found = histogram.percentile(percent)
        assert expected is not None
        assert found is not None
        assert abs(found / expected - 1) < 0.01
    assert histogram.total == 5000


def test_nothing_has_no_percentile_and_no_time_is_too_short() -> None:
    histogram = Histogram()
    assert histogram.percentile(50) is None

    histogram.add(0.0)
    histogram.add(-1.0)
    assert histogram.percentile(50) == histogram.percentile(95)
