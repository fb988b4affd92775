import io
from typing import Any

import pytest
from litestar.datastructures import UploadFile

from app.load.sources import Generated
from app.services.loads import Upload
from app.web.load_forms import DEFAULT_VALUES, MAX_UPLOAD_BYTES, SOURCES, read_load_form

CLASSES = ("premium", "standard", "bulk")


def upload(content: bytes = b"x", name: str = "my.jsonl") -> UploadFile:
    file = UploadFile("application/octet-stream", name)
    file.file.write(content)
    file.file.seek(0, io.SEEK_SET)
    return file


async def errors_of(**values: Any) -> dict[str, str]:
    return (await read_load_form({**DEFAULT_VALUES, **values}, CLASSES)).errors


@pytest.mark.parametrize("source", [source.name for source in SOURCES if source.name != "file"])
async def test_the_form_as_it_stands_makes_a_plan(source: str) -> None:
    form = await read_load_form({**DEFAULT_VALUES, "source": source}, CLASSES)

    assert form.errors == {}
    assert form.plan is not None
    assert (form.plan.max_rows, form.plan.concurrency, form.plan.scale) == (40, 64, None)
    assert form.plan.typed["source"] == source


async def test_what_is_typed_is_in_the_plan() -> None:
    form = await read_load_form(
        {**DEFAULT_VALUES, "source": "mooncake", "rows": " 7 ", "speed": "0", "scale": "2.5", "copies": "3"},
        CLASSES,
    )

    assert form.plan is not None
    assert (form.plan.max_rows, form.plan.speed, form.plan.scale, form.plan.num_copies) == (7, 0.0, 2.5, 3)


async def test_numbers_make_generated_requests() -> None:
    form = await read_load_form(
        {**DEFAULT_VALUES, "source": "generated", "rows": "9", "rate": "0.5"}, CLASSES
    )

    assert form.plan is not None
    assert form.plan.source == Generated(
        num_requests=9, rate_per_s=0.5, num_prompt_tokens=256, num_shared_tokens=128, num_answer_tokens=64
    )


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("rows", "", "empty is not a whole number from 1 to 10,000"),
        ("rows", "1.5", "1.5 is not a whole number"),
        ("rows", "1_0", "1_0 is not"),
        ("rows", "\u0663", "is not a whole number"),
        ("rows", "9" * 5000, "is not a whole number"),
        ("copies", "65", "from 1 to 64"),
        ("concurrency", "0", "from 1 to 1,024"),
        ("speed", "nan", "nan is not a number from 0 to 10,000"),
        ("speed", "inf", "inf is not a number"),
        ("scale", "0", "from 0.01 to 10,000"),
        ("seed", "-1", "from 0"),
    ],
)
async def test_a_bad_number_names_its_field_and_what_is_allowed(name: str, text: str, said: str) -> None:
    errors = await errors_of(**{"source": "mooncake", name: text})

    assert list(errors) == [name]
    assert said in errors[name]


async def test_fields_of_other_sources_do_not_count() -> None:
    assert await errors_of(source="mt-bench", speed="nonsense", prompt_tokens="-5") == {}


async def test_all_errors_come_together_and_the_values_stay() -> None:
    form = await read_load_form({"source": "generated", "rows": "x", "shared_tokens": "300"}, CLASSES)

    assert list(form.errors) == ["rows", "shared_tokens"]
    assert form.values["rows"] == "x"
    assert form.plan is None


async def test_an_unknown_source_is_an_error() -> None:
    assert list(await errors_of(source="http://elsewhere")) == ["source"]
    file = upload()
    assert list(await errors_of(source=file)) == ["source"]
    await file.close()


async def test_rows_times_copies_are_bounded() -> None:
    assert list(await errors_of(rows="10000", copies="64")) == ["copies"]


async def test_a_file_of_the_user_is_bounded_and_named() -> None:
    assert list(await errors_of(source="file")) == ["file"]
    assert list(await errors_of(source="file", file="text")) == ["file"]
    nameless = upload(name="")
    assert list(await errors_of(source="file", file=nameless)) == ["file"]
    await nameless.close()
    assert "allowed" in (await errors_of(source="file", file=upload(bytes(MAX_UPLOAD_BYTES + 1))))["file"]

    form = await read_load_form({"source": "file", "file": upload(name="/etc/\x00pass\nwd")}, CLASSES)
    assert form.plan is not None
    assert form.plan.source == Upload(name="passwd", content=b"x")


async def test_a_mix_of_priorities_is_in_the_plan() -> None:
    form = await read_load_form({**DEFAULT_VALUES, "priority": " premium=0.2, bulk=0.3 "}, CLASSES)

    assert form.plan is not None
    assert form.plan.priorities == (("premium", 0.2), ("bulk", 0.3))
    assert form.plan.typed["priority"] == "premium=0.2, bulk=0.3"


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ("premium", "'premium' is no class with its share; write priorities like premium=0.2,bulk=0.3."),
        ("vip=0.5", "There is no priority class vip; there are premium, standard, bulk."),
        ("premium=0.7,bulk=0.4", "The shares add up to 1.1; allowed: at most 1."),
    ],
)
async def test_a_mix_that_makes_no_sense_is_an_error_at_its_field(mix: str, message: str) -> None:
    assert await errors_of(priority=mix) == {"priority": message}
