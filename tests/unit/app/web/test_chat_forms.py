"""The composer's form: what is typed, what it means, what is wrong with it."""

import pytest

from app.services.chat_types import ChatParams
from app.web.chat_forms import fill_form, make_form, parse_form
from engine.errors import RequestError

EMPTY = make_form(ChatParams())


def test_an_untouched_form_means_the_defaults() -> None:
    asked = parse_form(fill_form({"text": "hello"}, EMPTY))
    assert (asked.text, asked.params) == ("hello", ChatParams())
    assert EMPTY.num_changed == 0


def test_empty_fields_mean_the_defaults() -> None:
    form = fill_form(dict.fromkeys(EMPTY.values, ""), EMPTY)
    assert parse_form(form).params == ChatParams()
    assert form.num_changed == 0


def test_what_is_typed_is_taken() -> None:
    form = fill_form(
        {
            "text": "a\r\nb",
            "system_prompt": "Be brief.",
            "temperature": " 0,5 ",
            "top_p": "0.9",
            "top_k": "40",
            "max_tokens": "64",
            "seed": "-7",
            "stop": "END\r\n\r\n two \r\n",
        },
        EMPTY,
    )
    asked = parse_form(form)
    assert asked.text == "a\nb"
    assert asked.system_prompt == "Be brief."
    assert asked.params == ChatParams(
        temperature=0.5, top_p=0.9, top_k=40, max_tokens=64, seed=-7, stop=("END", " two ")
    )
    assert form.num_changed == 7
    assert asked.params is not None
    assert parse_form(make_form(asked.params)).params == asked.params


@pytest.mark.parametrize("number", [0.1234567, 0.99999999, 1e-320, 1.0, 1 / 3])
def test_numbers_come_back_from_the_form_as_they_were(number: float) -> None:
    form = make_form(ChatParams(temperature=number, top_p=number))
    params = parse_form(fill_form({"text": "again"}, form)).params
    assert params is not None
    assert (params.temperature, params.top_p) == (number, number)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("temperature", "warm", "temperature is 'warm'; it must be a number"),
        ("temperature", "2.5", "temperature is 2.5; allowed: 0 to 2"),
        ("temperature", "nan", "temperature is nan"),
        ("temperature", "-1", "temperature is -1"),
        ("temperature", "1_0", "temperature is '1_0'; it must be a number"),
        ("temperature", "\uff11", "temperature is '\uff11'; it must be a number"),
        ("top_p", "0", "top_p is 0"),
        ("top_k", "1_000", "top_k is '1_000'; it must be a whole number"),
        ("max_tokens", "\uff11\uff12", "max_tokens is '\uff11\uff12'; it must be a whole number"),
        ("seed", "\u0663", "seed is '\u0663'; it must be a whole number"),
        ("top_k", "-3", "top_k is -3"),
        ("top_k", "1.5", "top_k is '1.5'; it must be a whole number"),
        ("max_tokens", "0", "max_tokens is 0"),
        ("max_tokens", "9" * 5000, "max_tokens is '999"),
        ("seed", "x", "seed is 'x'; it must be a whole number"),
        ("seed", "1" * 30, "seed is 1111"),
        ("stop", "x\n" * 17, "stop is a list of 17"),
        ("stop", "x" * 300, "stop is a string of 300 characters"),
    ],
)
def test_what_cannot_be_is_named_with_its_field(name: str, value: str, words: str) -> None:
    form = fill_form({"text": "hello", name: value}, EMPTY)
    with pytest.raises(RequestError) as caught:
        parse_form(form)
    assert caught.value.param == name
    assert words in str(caught.value)
    assert list(form.with_error(caught.value).errors) == [name]


def test_what_is_no_text_counts_as_empty() -> None:
    form = fill_form({"text": 3, "top_k": ["1"], "system_prompt": "\ud800"}, EMPTY)
    asked = parse_form(form)
    assert (asked.text, asked.system_prompt) == ("", "?")


def test_a_fault_of_no_field_belongs_to_the_whole() -> None:
    assert EMPTY.with_error(RequestError("no", param="elsewhere")).errors == {"": "no"}
    assert EMPTY.with_error(RequestError("no")).errors == {"": "no"}


@pytest.mark.parametrize(
    ("typed", "priority"), [("", None), (" 7 ", 7), ("-10", -10), ("premium", "premium"), ("1_0", "1_0")]
)
def test_a_priority_is_a_number_or_what_may_be_the_name_of_a_class(
    typed: str, priority: int | str | None
) -> None:
    params = parse_form(fill_form({"text": "hello", "priority": typed}, EMPTY)).params
    assert params == ChatParams(priority=priority)
    assert params is not None
    assert parse_form(make_form(params)).params == params
