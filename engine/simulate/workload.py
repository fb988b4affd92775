"""What is simulated: requests with their moments, lengths and tokens, and changes of policy on the way."""

import hashlib
import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

import msgspec

from engine.records import Policies

VOCAB_SIZE = 2**16
"""Token ids of prompts and answers; the one after them ends an answer."""

END_TOKEN = VOCAB_SIZE

_TOKEN_BYTES = 2


class Ending(StrEnum):
    """Why a request ends."""

    LENGTH = "length"
    """It has as many tokens as it may."""
    MODEL = "model"
    """The model ends it with its token number `num_output_tokens`."""
    TEXT = "text"
    """Its text reaches a stop string with token number `num_output_tokens`; the engine hears of it after."""
    CLIENT = "client"
    """Its client leaves, at `leave_ns`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedRequest:
    """One choice of a request. Times are nanoseconds on the simulated clock.

    `answer` are the tokens that the model gives first; after these it makes some up. `max_tokens` is what was
    asked for, `num_output_tokens` what the answer came to, which counts for the endings MODEL and TEXT.
    `leave_ns`: when the client leaves, or, with TEXT, when the engine hears of the stop (None: at once).
    """

    request_id: str
    arrival_ns: int
    prompt: list[int]
    max_tokens: int
    choice_index: int = 0
    priority: int = 0
    temperature: float = 0.0
    answer: list[int] = field(default_factory=list)
    ending: Ending = Ending.LENGTH
    num_output_tokens: int = 0
    leave_ns: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedLoad:
    """Requests in order of arrival, and policies with the moment from which they count."""

    requests: list[SimulatedRequest]
    policies: list[tuple[int, Policies]] = field(default_factory=list)

    def first(self, num_requests: int | None) -> "SimulatedLoad":
        """Return the load with the first so many requests alone (None: all)."""
        return replace(self, requests=self.requests[:num_requests])

    def with_policies(self, names: Mapping[str, str]) -> "SimulatedLoad":
        """Return the load with these fields of `Policies` fixed; the others change as before."""
        return replace(
            self,
            policies=[(t_ns, msgspec.structs.replace(policies, **names)) for t_ns, policies in self.policies],
        )

    def at_speed(self, speed: float) -> "SimulatedLoad":
        """Return the load with arrivals this many times faster, 0: all at once; patience stays as it is."""
        start_ns = min((request.arrival_ns for request in self.requests), default=0)

        def moved(t_ns: int) -> int:
            return start_ns + (round((t_ns - start_ns) / speed) if speed else 0)

        requests = []
        for request in self.requests:
            arrival_ns, leave_ns = moved(request.arrival_ns), request.leave_ns
            if leave_ns is not None:
                leave_ns += arrival_ns - request.arrival_ns
            requests.append(replace(request, arrival_ns=arrival_ns, leave_ns=leave_ns))
        return SimulatedLoad(
            requests=requests, policies=[(moved(t_ns), policies) for t_ns, policies in self.policies]
        )


def make_tokens(name: str, num_tokens: int) -> list[int]:
    """Return token ids that depend on nothing but the name: SHAKE-128 is the seeded generator."""
    tokens = array("H", hashlib.shake_128(name.encode()).digest(num_tokens * _TOKEN_BYTES))
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tolist()
