from typing import Any

import pytest
from litestar.testing import RequestFactory

from app.web.query_values import MAX_INTEGER, parse_int, read_flag, read_int
from engine.errors import RequestError


def make_query(**query: str) -> Any:
    return RequestFactory().get("/", query_params={**query})


@pytest.mark.parametrize(("text", "value"), [("0", 0), ("7", 7), ("007", 7), (str(MAX_INTEGER), MAX_INTEGER)])
def test_whole_numbers_are_read(text: str, value: int) -> None:
    assert parse_int(text, "step") == value
    assert read_int(make_query(step=text), "step", -1) == value


@pytest.mark.parametrize(
    "text", ["", "-", "-1", "1.0", "x", "1e3", "²", "٣", str(MAX_INTEGER + 1), "9" * 5000]
)
def test_anything_else_is_refused_by_name_and_shown_short(text: str) -> None:
    with pytest.raises(RequestError, match=r"^step is '.{0,41}'; allowed: a whole number, 0 to ") as raised:
        parse_int(text, "step")
    assert raised.value.param == "step"


def test_numbers_have_limits_and_defaults() -> None:
    assert read_int(make_query(), "limit", 50, 1, 200) == 50
    assert read_int(make_query(after="-1"), "after", 0, -1) == -1
    with pytest.raises(RequestError, match="limit is '201'; allowed: a whole number, 1 to 200"):
        read_int(make_query(limit="201"), "limit", 50, 1, 200)


@pytest.mark.parametrize(("text", "value"), [("1", True), ("true", True), ("0", False), ("False", False)])
def test_flags_are_read(text: str, value: bool) -> None:
    assert read_flag(make_query(blocks=text), "blocks", default=not value) is value
    assert read_flag(make_query(), "blocks", default=value) is value


def test_a_wrong_flag_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="blocks is 'maybe'; allowed: 1, 0, true, false"):
        read_flag(make_query(blocks="maybe"), "blocks", default=True)
