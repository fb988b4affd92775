import pytest
from litestar.datastructures import MultiDict

from app.web.request_context import format_ms, make_query
from app.web.request_query import check_names, parse_cursor, parse_filter
from app.web.templating import NO_VALUE
from engine.errors import RequestError


def test_empty_values_ask_for_nothing() -> None:
    assert parse_filter({"q": " ", "status": "", "since": ""}) == parse_filter({})


def test_a_filter_says_what_is_wanted() -> None:
    wanted = parse_filter(
        {"status": "failed, aborted", "kind": "chat", "q": " a_b% ", "since": "2026-11-30", "min_tokens": "5"}
    )
    assert wanted.statuses == ("failed", "aborted")
    assert (wanted.kind, wanted.text, wanted.min_tokens) == ("chat", "a_b%", 5)
    assert wanted.since_ns == 1_795_996_800 * 10**9


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"status": "done"}, "status"),
        ({"kind": "robot"}, "kind"),
        ({"min_tokens": "-1"}, "min_tokens"),
        ({"min_tokens": "many"}, "min_tokens"),
        ({"since": "yesterday"}, "since"),
        ({"since": "2026-11-30", "until": "2026-11-30"}, "until"),
        ({"q": "x" * 201}, "q"),
    ],
)
def test_an_error_names_the_field_and_what_it_may_be(query: dict[str, str], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_filter(query)
    assert caught.value.param == field
    assert str(caught.value).startswith(field)


@pytest.mark.parametrize("text", ["x", "1", ".a", "1.", "-1.a", "9" * 30 + ".a", "1." + "a" * 300, "²2.a"])
def test_a_cursor_that_no_list_gave_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="before"):
        parse_cursor(text)


def test_a_misspelt_or_doubled_parameter_is_refused() -> None:
    check_names(MultiDict([("q", "a")]), ("q", "limit"))
    with pytest.raises(RequestError, match="'statsu' is no parameter"):
        check_names(MultiDict([("statsu", "a")]), ("q", "limit"))
    with pytest.raises(RequestError, match="q is there more than once"):
        check_names(MultiDict([("q", "a"), ("q", "b")]), ("q", "limit"))


def test_an_address_keeps_the_filters_that_are_set() -> None:
    query = make_query({"q": "a b", "status": "", "kind": "api", "other": "x"}, before="1.a")
    assert query == "kind=api&q=a+b&before=1.a"


@pytest.mark.parametrize(
    ("ms", "text"),
    [(None, NO_VALUE), (0.04, "0.0 ms"), (99.94, "99.9 ms"), (250, "250 ms"), (1500, "1.50 s")],
)
def test_spans_are_in_the_unit_that_suits_them(ms: float | None, text: str) -> None:
    assert format_ms(ms) == text
