"""What only the caller of the engine knows of a request: why it was made, its texts, what was delivered."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

import msgspec

from engine.sampling_params import SamplingParams

KIND_API: Final = "api"
KIND_CHAT: Final = "chat"
KIND_LOAD: Final = "load"
KINDS: Final = (KIND_API, KIND_CHAT, KIND_LOAD)
"""Who asked: a client of `/v1`, the playground, the load page."""

_DEFAULTS: Final = SamplingParams()

MayKeepText = Callable[[], bool]


def always() -> bool:
    """Say yes: the switch for texts alone decides."""
    return True


@dataclass(frozen=True, kw_only=True)
class RequestInfo:
    """Told before the engine gets the request.

    Either `messages` or `prompts` is given, as in `GenerationSpec`; choice j of prompt i has choice index
    i * num_choices + j. `may_keep_text` is asked whenever a text of it is about to be put on record; once it
    has said no it must never say yes again.
    """

    request_id: str
    kind: str
    conversation_id: str | None
    sampling_params: SamplingParams
    num_choices: int
    num_prompts: int
    messages: list[dict[str, str]] | None
    prompts: list[str | list[int]] | None
    may_keep_text: MayKeepText = always
    priority: int = 0

    def without_texts(self) -> "RequestInfo":
        """Return what is left once no text of it may be kept."""
        return replace(self, messages=None, prompts=None, may_keep_text=lambda: False)


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """What was delivered, one entry per choice; `finish_reasons` are None where a choice did not end.

    The engine may have computed a token or two more, before it heard of a stop string.
    """

    request_id: str
    texts: list[str]
    num_tokens: list[int]
    finish_reasons: list[str | None]


def encode_params(params: SamplingParams, *, with_texts: bool) -> str:
    """Return what differs from the defaults as JSON; stop strings are texts."""
    values = {
        name: value
        for name, value in msgspec.structs.asdict(params).items()
        if value != getattr(_DEFAULTS, name) and (with_texts or name != "stop")
    }
    return msgspec.json.encode(values).decode()


class RequestSink(Protocol):
    """Who keeps this. Calls come on the event loop, take microseconds and raise nothing."""

    def describe(self, info: RequestInfo) -> None:
        """Take what is known before the engine gets the request."""

    def withdraw(self, request_id: str) -> None:
        """The request was refused; its texts are not needed."""

    def add_output(self, info: RequestInfo, output: RequestOutput) -> None:
        """Take what was delivered; comes once, when the caller lets go of the request."""


class NoRequestSink:
    """Keeps nothing."""

    def describe(self, info: RequestInfo) -> None:
        """Do nothing."""

    def withdraw(self, request_id: str) -> None:
        """Do nothing."""

    def add_output(self, info: RequestInfo, output: RequestOutput) -> None:
        """Do nothing."""
