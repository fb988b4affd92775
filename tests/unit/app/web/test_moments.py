import time
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.web.moments import parse_moment, to_rfc3339, to_words
from app.web.templating import make_environment
from engine.errors import RequestError

T_NS = 1_796_012_107_250_000_000  # 2026-11-30 04:15:07.25 UTC


@pytest.fixture(params=["America/New_York", "Asia/Kolkata", "UTC"])
def _zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("_zone")
def test_moments_are_told_in_utc_whatever_the_zone_of_the_server() -> None:
    assert to_rfc3339(T_NS) == "2026-11-30T04:15:07.250000Z"
    assert to_words(T_NS) == "2026-11-30 04:15:07 UTC"
    template = make_environment().from_string("{{ t | moment }} {{ t | rfc3339 }}")
    assert template.render(t=T_NS) == "2026-11-30 04:15:07 UTC 2026-11-30T04:15:07.250000Z"


@pytest.mark.usefixtures("_zone")
@pytest.mark.parametrize(
    "text",
    [
        "2026-11-30T04:15:07.25Z",
        "2026-11-30T04:15:07.250000+00:00",
        "2026-11-30 04:15:07.25 UTC",
        " 2026-11-30 04:15:07.25 ",
        "2026-11-30T04:15:07.25",
        "2026-11-29T23:15:07.25-05:00",
        "2026-11-30T09:45:07.25+05:30",
        "2026-11-30T09:45:07.25 05:30",
        "2026-11-30t04:15:07.25z",
    ],
)
def test_a_moment_may_be_written_in_many_ways_and_is_utc_without_an_offset(text: str) -> None:
    assert parse_moment(text, "since") == T_NS


@pytest.mark.usefixtures("_zone")
def test_a_day_is_its_first_moment_in_utc() -> None:
    assert to_words(parse_moment("2026-11-30", "since")) == "2026-11-30 00:00:00 UTC"
    assert to_words(parse_moment("2026-11-30 04:15", "since")) == "2026-11-30 04:15:00 UTC"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "yesterday",
        "2026-13-01",
        "2026-11-30T25:00",
        "1969-12-31",
        "2300-01-01",
        "0001-01-01",
        "9999-12-31",
        "2026-11-30T04:15+02:00Z",
        "2026-11-30T04:15:07-24:00",
        "x" * 5000,
        "2026-11-30\x00",
    ],
)
def test_what_is_no_moment_is_refused_with_the_name_of_the_parameter(text: str) -> None:
    with pytest.raises(RequestError, match=r"^since: ") as caught:
        parse_moment(text, "since")
    assert caught.value.param == "since"
    assert len(str(caught.value)) < 200


@given(st.text(max_size=40))
def test_any_text_is_a_moment_or_refused(text: str) -> None:
    try:
        t_ns = parse_moment(text, "until")
    except RequestError:
        return
    assert 0 <= t_ns < 2**63


@given(st.integers(0, 7_000_000_000_000_000))
def test_what_is_told_to_programs_is_read_back_to_the_microsecond(t_us: int) -> None:
    text = to_rfc3339(t_us * 1000 + 999)
    assert parse_moment(text, "since") == t_us * 1000
    assert datetime.fromisoformat(text).astimezone(UTC).microsecond == t_us % 1_000_000
