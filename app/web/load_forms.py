"""The form of the load page: its fields, and from what was typed to a plan or to errors by field."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, Final

from litestar.datastructures import UploadFile

from app.load.files import LoadError
from app.load.priorities import MAX_MIX_CHARS, PriorityMix, parse_mix
from app.load.sources import Generated
from app.services.loads import LoadPlan, Upload
from app.web.form_data import MAX_NUMBER_CHARS, parse_decimal, parse_whole

MAX_UPLOAD_BYTES: Final = 3 * 2**20
MAX_FORM_BYTES: Final = 4 * 2**20
MAX_REQUESTS: Final = 20_000
"""Rows times copies."""

MAX_NAME_CHARS: Final = 80

GENERATED: Final = "generated"
FILE: Final = "file"


@dataclass(frozen=True)
class SourceChoice:
    """One way to come by requests, as the form shows it; `groups` are the groups of fields that count."""

    name: str
    title: str
    hint: str
    groups: tuple[str, ...]


SOURCES: Final = (
    SourceChoice(
        "mt-bench",
        "MT-bench questions",
        "80 conversations of two turns; the second turn finds the first one cached.",
        ("prompts",),
    ),
    SourceChoice(
        "azure-conv",
        "Azure chat traffic",
        "200 requests of a public trace: real arrival times and lengths, synthetic text.",
        ("trace",),
    ),
    SourceChoice(
        "mooncake",
        "Mooncake chat traffic",
        "200 requests of a public trace with long prompts that share their beginnings.",
        ("trace",),
    ),
    SourceChoice(
        GENERATED,
        "Equal requests",
        "Prompts of one length with a shared beginning, arriving at random.",
        (GENERATED,),
    ),
    SourceChoice(
        FILE,
        "A file of yours",
        "Azure CSV or Mooncake JSONL (a trace), or MT-bench JSONL (prompts); at most 3 MiB.",
        (FILE, "prompts", "trace"),
    ),
)


@dataclass(frozen=True)
class NumberField:
    """One number of the form. `group` is the kind of source for which it counts, empty: for all."""

    name: str
    label: str
    hint: str
    default: str
    low: float
    high: float
    group: str = ""
    is_whole: bool = True
    is_optional: bool = False

    @property
    def step(self) -> str:
        """The `step` of the input."""
        return "1" if self.is_whole else "any"


FIELDS: Final = (
    NumberField("rows", "Requests or conversations", "The first so many of the source.", "40", 1, 10_000),
    NumberField("copies", "Copies of each", "Sent together: they share their blocks.", "1", 1, 64),
    NumberField("concurrency", "At once", "Most requests that are open at a time.", "64", 1, 1024),
    NumberField(
        "speed",
        "Speed",
        "Times faster than recorded; 0 sends all at once.",
        "1",
        0,
        10_000,
        group="trace",
        is_whole=False,
    ),
    NumberField(
        "scale",
        "Lengths divided by",
        "Empty: 1 for Azure, 32 for Mooncake.",
        "",
        0.01,
        10_000,
        group="trace",
        is_whole=False,
        is_optional=True,
    ),
    NumberField("max_tokens", "Longest answer", "In tokens.", "128", 1, 100_000, group="prompts"),
    NumberField(
        "rate",
        "Requests a second",
        "On average; 0 sends all at once.",
        "4",
        0,
        1_000,
        group=GENERATED,
        is_whole=False,
    ),
    NumberField("prompt_tokens", "Prompt", "In tokens.", "256", 1, 1_000_000, group=GENERATED),
    NumberField(
        "shared_tokens", "Of it shared", "Equal leading tokens.", "128", 0, 1_000_000, group=GENERATED
    ),
    NumberField("answer_tokens", "Answer", "In tokens.", "64", 1, 100_000, group=GENERATED),
    NumberField("seed", "Seed", "Of synthetic tokens and arrivals.", "0", 0, 2**31 - 1),
)

PRIORITY: Final = "priority"
DEFAULT_VALUES: Final = {
    "source": SOURCES[0].name,
    **{field.name: field.default for field in FIELDS},
    PRIORITY: "",
}


@dataclass(frozen=True)
class LoadForm:
    """What was typed, what is wrong with it by field, and the plan if nothing is."""

    values: dict[str, str]
    errors: dict[str, str]
    plan: LoadPlan | None


async def read_load_form(data: Mapping[str, Any], classes: Sequence[str]) -> LoadForm:
    """Check a form that was sent; fields that do not count for the source are not looked at.

    `classes` are the names that priorities may have.
    """
    values = {name: _text_of(data.get(name), default) for name, default in DEFAULT_VALUES.items()}
    values[PRIORITY] = _text_of(data.get(PRIORITY), "", MAX_MIX_CHARS)
    values["source"] = _text_of(data.get("source"), "")
    source = next((choice for choice in SOURCES if choice.name == values["source"]), None)
    if source is None:
        return LoadForm(values, {"source": "Choose one of the sources."}, None)
    errors: dict[str, str] = {}
    numbers: dict[str, float] = {}
    for field in FIELDS:
        if not field.group or field.group in source.groups:
            try:
                numbers[field.name] = _read_number(field, values[field.name])
            except ValueError as error:
                errors[field.name] = str(error)
    upload = await _read_upload(data.get("file"), errors) if source.name == FILE else None
    _check_together(numbers, errors)
    mix = _read_mix(values[PRIORITY], classes, errors)
    if errors:
        return LoadForm(values, errors, None)
    plan = _make_plan(source, numbers, upload)
    return LoadForm(values, errors, replace(plan, priorities=mix, typed=values))


def _text_of(value: object, default: str, max_chars: int = MAX_NUMBER_CHARS) -> str:
    """Return a field as text; one that was not sent has its default."""
    if value is None:
        return default
    return value.strip()[: max_chars + 1] if isinstance(value, str) else ""


def _read_mix(text: str, classes: Sequence[str], errors: dict[str, str]) -> PriorityMix:
    try:
        mix = parse_mix(text)
    except LoadError as error:
        errors[PRIORITY] = str(error)
        return ()
    for name, _ in mix:
        if name not in classes:
            errors[PRIORITY] = f"There is no priority class {name}; there are {', '.join(classes)}."
    return mix


def _read_number(field: NumberField, text: str) -> float:
    """Return the number, NaN for an optional one left empty; `ValueError` says what is allowed."""
    if not text and field.is_optional:
        return math.nan
    allowed = f"{_show(field.low)} to {_show(field.high)}"
    kind = "a whole number" if field.is_whole else "a number"
    number = parse_whole(text) if field.is_whole else parse_decimal(text)
    if number is None or not field.low <= number <= field.high:
        raise ValueError(f"{field.label}: {text or 'empty'} is not {kind} from {allowed}.")
    return float(number)


def _show(number: float) -> str:
    return f"{number:,.0f}" if number == int(number) else f"{number:g}"


async def _read_upload(file: object, errors: dict[str, str]) -> Upload | None:
    if not isinstance(file, UploadFile) or not file.filename:
        errors["file"] = "Choose a file."
        return None
    content = await file.read()
    await file.close()
    if len(content) > MAX_UPLOAD_BYTES:
        errors["file"] = f"The file has {len(content):,} bytes; allowed: {MAX_UPLOAD_BYTES:,}."
        return None
    name = "".join(character for character in PurePath(file.filename).name if character.isprintable())
    return Upload(name=name[:MAX_NAME_CHARS] or "file", content=content)


def _check_together(numbers: Mapping[str, float], errors: dict[str, str]) -> None:
    if numbers.get("rows", 0) * numbers.get("copies", 0) > MAX_REQUESTS:
        errors["copies"] = f"Requests times copies are more than {MAX_REQUESTS:,}; take fewer."
    if numbers.get("shared_tokens", 0) > numbers.get("prompt_tokens", math.inf):
        errors["shared_tokens"] = "Of it shared: more than the prompt has."


def _make_plan(source: SourceChoice, numbers: Mapping[str, float], upload: Upload | None) -> LoadPlan:
    whole = {name: int(number) for name, number in numbers.items() if not math.isnan(number)}
    title = source.title
    chosen: str | Upload | Generated = source.name
    if upload is not None:
        chosen, title = upload, upload.name
    elif source.name == GENERATED:
        chosen = Generated(
            num_requests=whole["rows"],
            rate_per_s=numbers["rate"],
            num_prompt_tokens=whole["prompt_tokens"],
            num_shared_tokens=whole["shared_tokens"],
            num_answer_tokens=whole["answer_tokens"],
        )
    scale = numbers.get("scale", math.nan)
    return LoadPlan(
        title=title,
        source=chosen,
        max_rows=whole["rows"],
        num_copies=whole["copies"],
        concurrency=whole["concurrency"],
        speed=numbers.get("speed", 1.0),
        scale=None if math.isnan(scale) else scale,
        max_tokens=whole.get("max_tokens", 128),
        seed=whole["seed"],
    )
