"""What only the caller of the engine knows of a request: why it was made, its texts, what was delivered."""

from dataclasses import dataclass
from typing import Final, Protocol

from engine.sampling_params import SamplingParams

KIND_API: Final = "api"
KIND_CHAT: Final = "chat"
KIND_LOAD: Final = "load"
KINDS: Final = (KIND_API, KIND_CHAT, KIND_LOAD)
"""Who asked: a client of `/v1`, the playground, the load page."""


@dataclass(frozen=True, kw_only=True)
class RequestInfo:
    """Told before the engine gets the request.

    Either `messages` or `prompts` is given, as in `GenerationSpec`; choice j of prompt i has choice index
    i * num_choices + j.
    """

    request_id: str
    kind: str
    conversation_id: str | None
    sampling_params: SamplingParams
    num_choices: int
    num_prompts: int
    messages: list[dict[str, str]] | None
    prompts: list[str | list[int]] | None


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """What was delivered, one entry per choice; `finish_reasons` are None where a choice did not end.

    The engine may have computed a token or two more, before it heard of a stop string.
    """

    request_id: str
    texts: list[str]
    num_tokens: list[int]
    finish_reasons: list[str | None]


class RequestSink(Protocol):
    """Who keeps this. Calls come on the event loop, take microseconds and raise nothing."""

    def describe(self, info: RequestInfo) -> None:
        """Take what is known before the engine gets the request."""

    def withdraw(self, request_id: str) -> None:
        """The request was refused; its texts are not needed."""

    def add_output(self, output: RequestOutput) -> None:
        """Take what was delivered; comes once, when the caller lets go of the request."""


class NoRequestSink:
    """Keeps nothing."""

    def describe(self, info: RequestInfo) -> None:
        """Do nothing."""

    def withdraw(self, request_id: str) -> None:
        """Do nothing."""

    def add_output(self, output: RequestOutput) -> None:
        """Do nothing."""
