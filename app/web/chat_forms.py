"""The composer of the chat: its fields, what was typed into them, and what is wrong with it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from app.services.chat_rules import ChatInput
from app.services.chat_types import MAX_TEXT_CHARS, ChatParams
from app.web.form_data import MAX_NUMBER_CHARS, format_decimal, parse_decimal, parse_whole
from engine.errors import RequestError
from engine.sampling_params import MAX_COUNT, MAX_STOP_CHARS, MAX_STOP_STRINGS, MAX_TEMPERATURE

_BYTES_PER_CHAR: Final = len("%F0%9F%98%80")
"""What a form makes of a character, at most."""

MAX_FORM_BYTES: Final = _BYTES_PER_CHAR * (2 * MAX_TEXT_CHARS + MAX_STOP_STRINGS * MAX_STOP_CHARS) + 64 * 1024
"""Whatever is allowed in the fields arrives, in the least compact way of writing it."""


class ParamField(msgspec.Struct, frozen=True, kw_only=True):
    """One sampling setting in the form. `default` is what an untouched form has in it."""

    name: str
    label: str
    default: str
    hint: str
    input_mode: str = "numeric"


def _make_fields() -> tuple[ParamField, ...]:
    default = ChatParams()
    return (
        ParamField(
            name="temperature",
            label="Temperature",
            default=format_decimal(default.temperature),
            hint=f"0 to {MAX_TEMPERATURE:g}; 0 always takes the likeliest token",
            input_mode="decimal",
        ),
        ParamField(
            name="top_p",
            label="Top-p",
            default=format_decimal(default.top_p),
            hint="above 0, at most 1; 1 is off",
            input_mode="decimal",
        ),
        ParamField(name="top_k", label="Top-k", default=str(default.top_k), hint="0 is off"),
        ParamField(
            name="max_tokens", label="Max tokens", default=str(default.max_tokens), hint="longest answer"
        ),
        ParamField(name="seed", label="Seed", default="", hint="empty: a new one for each answer"),
        ParamField(
            name="priority",
            label="Priority",
            default="",
            hint="a number, lower is more urgent, or a class such as premium; empty: 0",
            input_mode="text",
        ),
        ParamField(
            name="stop",
            label="Stop strings",
            default="",
            hint=f"one a line, at most {MAX_STOP_STRINGS} of {MAX_STOP_CHARS} characters",
            input_mode="text",
        ),
    )


PARAM_FIELDS: Final = _make_fields()


@dataclass(frozen=True)
class ComposerForm:
    """What the form shows: texts as typed, and the fault of each field by its name ("" for the whole)."""

    values: Mapping[str, str]
    errors: Mapping[str, str] = field(default_factory=dict)

    def is_changed(self, name: str) -> bool:
        """Whether a field differs from what an untouched form has in it."""
        defaults = {param.name: param.default for param in PARAM_FIELDS}
        default = defaults.get(name, "")
        return (self.values[name].strip() or default) != default

    @property
    def num_changed(self) -> int:
        """Sampling settings that differ, the system prompt included."""
        return sum(self.is_changed(name) for name in ("system_prompt", *(f.name for f in PARAM_FIELDS)))

    def with_error(self, error: RequestError) -> "ComposerForm":
        """Return the form with a fault shown at the field that it is about."""
        name = error.param if error.param in self.values else ""
        return ComposerForm(self.values, {**self.errors, name or "": str(error)})


def make_form(params: ChatParams, system_prompt: str = "", text: str = "") -> ComposerForm:
    """Return the form of a conversation."""
    return ComposerForm(
        {
            "text": text,
            "system_prompt": system_prompt,
            "temperature": format_decimal(params.temperature),
            "top_p": format_decimal(params.top_p),
            "top_k": str(params.top_k),
            "max_tokens": str(params.max_tokens),
            "seed": "" if params.seed is None else str(params.seed),
            "priority": "" if params.priority is None else str(params.priority),
            "stop": "\n".join(params.stop),
        }
    )


def fill_form(data: Mapping[str, Any], base: ComposerForm) -> ComposerForm:
    """Return what was sent; fields that were not are as in `base`."""
    values = {name: _clean(data.get(name, value)) for name, value in base.values.items()}
    return ComposerForm(values)


def parse_form(form: ComposerForm) -> ChatInput:
    """Return the input that a form asks for; raises `RequestError` naming the first field at fault."""
    values = form.values
    texts = {param.name: values[param.name].strip() or param.default for param in PARAM_FIELDS}
    params = ChatParams(
        temperature=_read_float(texts, "temperature"),
        top_p=_read_float(texts, "top_p"),
        top_k=_read_int(texts, "top_k"),
        max_tokens=_read_int(texts, "max_tokens"),
        seed=_read_int(texts, "seed") if texts["seed"] else None,
        priority=_read_priority(texts["priority"]),
        stop=tuple(line for line in values["stop"].split("\n") if line),
    )
    params.to_sampling_params().validate()
    return ChatInput(values["text"], values["system_prompt"], params)


def _clean(value: object) -> str:
    """Return the text of a field; a browser sends line ends as CR LF. Surrogates cannot be stored."""
    text = value if isinstance(value, str) else ""
    return text.replace("\r\n", "\n").replace("\r", "\n").encode("utf-8", "replace").decode()


def _read_float(texts: Mapping[str, str], name: str) -> float:
    number = parse_decimal(texts[name].replace(",", "."))
    if number is None:
        raise _refuse(name, texts[name], "a number, such as 0.7")
    return number


def _read_int(texts: Mapping[str, str], name: str) -> int:
    number = parse_whole(texts[name])
    if number is None:
        wanted = f"a whole number, at most {MAX_COUNT}" if name != "seed" else "a whole number"
        raise _refuse(name, texts[name], wanted)
    return number


def _read_priority(text: str) -> int | str | None:
    """Return a number, or what may be the name of a class; who knows the classes checks it."""
    number = parse_whole(text)
    return (text or None) if number is None else number


def _refuse(name: str, text: str, wanted: str) -> RequestError:
    return RequestError(
        f"{name} is {text[:MAX_NUMBER_CHARS]!r}; it must be {wanted}.", param=name, code="invalid_value"
    )
