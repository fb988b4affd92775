"""From the body of an OpenAI request to what the generation service takes; everything wrong is named."""

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar
from uuid import uuid4

import msgspec
from litestar import Request
from litestar.exceptions import InternalServerException

from app.errors import UnsupportedMediaTypeError
from app.services.generation import GenerationSpec
from app.web.schemas import (
    DEFAULT_COMPLETION_TOKENS,
    HARMLESS_FIELDS,
    MAX_ANSWERS,
    MAX_CHOICES,
    MAX_MESSAGES,
    MAX_PROMPTS,
    NEUTRAL_VALUES,
    ChatCompletionBody,
    ChatMessage,
    CompletionBody,
    GenerationBody,
)
from engine.errors import RequestError
from engine.sampling_params import MAX_COUNT, SamplingParams

logger = logging.getLogger(__name__)

BODY_TIMEOUT_S = 30.0
"""A client that takes longer to send its body is turned away."""

MAX_COUNTED_NAMES = 256
MAX_NAMES_PER_REQUEST = 32
MAX_NAME_CHARS = 64
OTHER_NAMES = "(other)"

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

Body = TypeVar("Body", bound=GenerationBody)
Body_co = TypeVar("Body_co", bound=GenerationBody, covariant=True)

_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"missing required field `(?P<name>[^`]*)`")


@dataclass(frozen=True)
class ParsedRequest(Generic[Body_co]):
    """A body, the generation that it asks for, and names of some of its fields that nobody knows."""

    body: Body_co
    spec: GenerationSpec
    ignored: list[str]


class IgnoredFields:
    """Counts request fields that nobody knows, so that an operator can see what clients hope for."""

    def __init__(self) -> None:
        """Start with none."""
        self.counts: Counter[str] = Counter()

    def add(self, names: Iterable[str]) -> None:
        """Count names; at most `MAX_COUNTED_NAMES` are told apart."""
        for full_name in names:
            name = full_name[:MAX_NAME_CHARS]
            if name not in self.counts and len(self.counts) >= MAX_COUNTED_NAMES:
                name = OTHER_NAMES
            self.counts[name] += 1
            logger.debug("ignored the unknown request field %r", name)


async def read_json(request: Request[Any, Any, Any]) -> bytes:
    """Return the body of a JSON request; refuses other content types and bodies that do not come."""
    content_type, _, parameters = request.headers.get("content-type", "").lower().partition(";")
    if content_type.strip() != "application/json":
        raise UnsupportedMediaTypeError("The body must be JSON, sent with Content-Type: application/json.")
    charset = _find_charset(parameters)
    if charset not in {"utf-8", "utf8"}:
        raise UnsupportedMediaTypeError(f"The body must be UTF-8, not {charset[:40]!r}.")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise UnsupportedMediaTypeError(
            f"The body must come as it is, without Content-Encoding {encoding[:40]!r}."
        )
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.body()
    except TimeoutError:
        raise RequestError(f"The body did not arrive within {BODY_TIMEOUT_S:g} s.") from None
    except InternalServerException:  # Litestar's word for a client that left
        raise RequestError("The connection ended before the whole body had arrived.") from None


def _find_charset(parameters: str) -> str:
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip() == "charset":
            return value.strip().strip('"')
    return "utf-8"


def parse_chat(raw: bytes) -> ParsedRequest[ChatCompletionBody]:
    """Return what a chat completion asks for; may run in any thread."""
    body, ignored = _decode(raw, ChatCompletionBody)
    if not 1 <= len(body.messages) <= MAX_MESSAGES:
        raise _invalid("messages", f"has {len(body.messages)} entries; allowed: 1 to {MAX_MESSAGES}")
    spec = GenerationSpec(
        request_id=f"chatcmpl-{uuid4().hex}",
        sampling_params=_make_sampling_params(body, None),
        num_choices=_get_num_choices(body),
        messages=[_make_message(index, message) for index, message in enumerate(body.messages)],
    )
    return ParsedRequest(body, spec, ignored)


def parse_completion(raw: bytes) -> ParsedRequest[CompletionBody]:
    """Return what a text completion asks for; may run in any thread."""
    body, ignored = _decode(raw, CompletionBody)
    prompts, num_choices = _make_prompts(body.prompt), _get_num_choices(body)
    if len(prompts) * num_choices > MAX_ANSWERS:
        raise _invalid("n", f"times the prompts is {len(prompts) * num_choices}; allowed: 1 to {MAX_ANSWERS}")
    spec = GenerationSpec(
        request_id=f"cmpl-{uuid4().hex}",
        sampling_params=_make_sampling_params(body, DEFAULT_COMPLETION_TOKENS),
        num_choices=num_choices,
        prompts=prompts,
    )
    return ParsedRequest(body, spec, ignored)


def _decode(raw: bytes, kind: type[Body]) -> tuple[Body, list[str]]:
    """Return a body and the names of its fields that nobody knows, some of them if there are many."""
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        body = msgspec.json.decode(raw, type=kind)
        _check_unsupported({name: value for name, value in fields.items() if name in NEUTRAL_VALUES})
    except msgspec.ValidationError as error:
        raise _describe_validation(str(error)) from None
    except RecursionError:
        raise RequestError("The body is nested too deeply.", code="invalid_json") from None
    except ValueError as error:  # malformed JSON, text that is not UTF-8
        raise RequestError(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    known = {field.name for field in msgspec.structs.fields(kind)}
    unknown = fields.keys() - known - NEUTRAL_VALUES.keys() - HARMLESS_FIELDS
    return body, list(islice(unknown, MAX_NAMES_PER_REQUEST))


def _check_unsupported(fields: Mapping[str, msgspec.Raw]) -> None:
    for name, raw in fields.items():
        value = msgspec.json.decode(raw)
        if value is None:
            continue
        # Not `in`: False == 0, and false is no way to say 0.
        if not any(
            value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
            for neutral in NEUTRAL_VALUES[name]
        ):
            raise RequestError(
                f"{name} is not supported by this server; leave it out.",
                param=name,
                code="unsupported_parameter",
            )


def _describe_validation(message: str) -> RequestError:
    """Turn msgspec's words into a message with the API's field name as `param`."""
    found = _PATH.search(message)
    path = found.group("path") if found else ""
    text = _PATH.sub("", message)
    missing = _MISSING.search(text)
    if missing:
        path = f"{path}.{missing.group('name')}".lstrip(".")
        return RequestError(f"{path} is required.", param=path, code="missing_required_parameter")
    return RequestError(f"{path or 'The body'}: {text}.", param=path or None, code="invalid_type")


def _invalid(param: str, what: str) -> RequestError:
    return RequestError(f"{param} {what}.", param=param, code="invalid_value")


def _get_num_choices(body: GenerationBody) -> int:
    num_choices = 1 if body.n is None else body.n
    if not 1 <= num_choices <= MAX_CHOICES:
        raise _invalid("n", f"is {num_choices}; allowed: 1 to {MAX_CHOICES}")
    return num_choices


def _get_max_tokens(body: GenerationBody) -> int | None:
    """Return the limit under whichever of its two names it came."""
    given = {"max_tokens": body.max_tokens, "max_completion_tokens": body.max_completion_tokens}
    limits = {name: value for name, value in given.items() if value is not None}
    for name, value in limits.items():
        if not 1 <= value <= MAX_COUNT:
            raise _invalid(name, f"is {value}; allowed: 1 to {MAX_COUNT}")
    if len(set(limits.values())) > 1:
        raise _invalid("max_completion_tokens", "differs from max_tokens; send one of them")
    return next(iter(limits.values()), None)


def _make_sampling_params(body: GenerationBody, default_max_tokens: int | None) -> SamplingParams:
    max_tokens = _get_max_tokens(body)
    given: dict[str, Any] = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "ignore_eos": body.ignore_eos,
    }
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    params = SamplingParams(
        max_tokens=default_max_tokens if max_tokens is None else max_tokens,
        seed=body.seed,
        stop=stop,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        **{name: value for name, value in given.items() if value is not None},
    )
    params.validate()
    return params


def _make_message(index: int, message: ChatMessage) -> dict[str, str]:
    where = f"messages[{index}]"
    role = ROLES.get(message.role)
    if role is None:
        raise _invalid(f"{where}.role", f"is {message.role[:40]!r}; allowed: {', '.join(ROLES)}")
    if bytes(message.tool_calls) not in {b"null", b"[]"}:
        raise RequestError(
            f"{where}.tool_calls: tools are not supported by this server.",
            param=f"{where}.tool_calls",
            code="unsupported_parameter",
        )
    if message.content is None:
        raise _invalid(f"{where}.content", "is null; it must be text or a list of text parts")
    if isinstance(message.content, str):
        return {"role": role, "content": message.content}
    texts = []
    for number, part in enumerate(message.content):
        if part.type != "text" or part.text is None:
            raise _invalid(f"{where}.content[{number}]", "is no text part; only text is supported")
        texts.append(part.text)
    return {"role": role, "content": "\n".join(texts)}


def _make_prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise _invalid("prompt", "is empty")
    # One pass that creates nothing: there may be millions of entries, all but the ids too many.
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [[entry for entry in prompt if isinstance(entry, int)]]
    if len(prompt) > MAX_PROMPTS:
        raise _invalid("prompt", f"has {len(prompt)} entries; allowed: 1 to {MAX_PROMPTS}")
    if len(kinds) > 1:
        raise _invalid("prompt", "mixes texts and token ids")
    return [entry for entry in prompt if not isinstance(entry, int)]
