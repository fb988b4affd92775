"""How the next token of one sequence is chosen and when the sequence ends."""

import math

import msgspec

from engine.errors import RequestError

GREEDY_TEMPERATURE = 1e-3
"""At or below this temperature sampling is greedy: dividing logits by less overflows half precision
and the distribution is a single token anyway."""

MAX_TEMPERATURE = 2.0
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_COUNT = 2**31 - 1
"""Bound of counts that a client sends: far above any use, far below what overflows a tensor."""

MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling settings of one request. Call `validate` before use.

    `max_tokens` is the most tokens to generate; None means up to the context's end. `top_k` 0 and
    `top_p` 1.0 switch those filters off. With a `seed`, token number `i` of choice `c` depends on
    nothing but the logits and (seed, c, i). `stop` strings are matched on text by the caller of the
    engine; `stop_token_ids` and the model's end tokens by the scheduler. `ignore_eos` switches the
    model's end tokens off, not `stop_token_ids`.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, without drawing."""
        return self.temperature <= GREEDY_TEMPERATURE or self.top_k == 1

    def validate(self, vocab_size: int | None = None) -> None:
        """Raise `RequestError` naming the first field that is out of range."""
        if self.max_tokens is not None and not 1 <= self.max_tokens <= MAX_COUNT:
            raise _out_of_range("max_tokens", self.max_tokens, f"1 to {MAX_COUNT}")
        if not (math.isfinite(self.temperature) and 0 <= self.temperature <= MAX_TEMPERATURE):
            raise _out_of_range("temperature", self.temperature, f"0 to {MAX_TEMPERATURE:g}")
        if not (math.isfinite(self.top_p) and 0 < self.top_p <= 1):
            raise _out_of_range("top_p", self.top_p, "above 0 and at most 1")
        if not 0 <= self.top_k <= MAX_COUNT:
            raise _out_of_range("top_k", self.top_k, f"0 (off) to {MAX_COUNT}")
        if self.seed is not None and not MIN_SEED <= self.seed <= MAX_SEED:
            raise _out_of_range("seed", self.seed, "a 64-bit integer")
        self._validate_stops(vocab_size)

    def _validate_stops(self, vocab_size: int | None) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise _out_of_range("stop", f"a list of {len(self.stop)}", f"at most {MAX_STOP_STRINGS} strings")
        for text in self.stop:
            if not 1 <= len(text) <= MAX_STOP_CHARS:
                raise _out_of_range(
                    "stop", f"a string of {len(text)} characters", f"1 to {MAX_STOP_CHARS} characters"
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise _out_of_range(
                "stop_token_ids", f"a list of {len(self.stop_token_ids)}", f"at most {MAX_STOP_TOKEN_IDS} ids"
            )
        largest = MAX_COUNT if vocab_size is None else vocab_size - 1
        for token_id in self.stop_token_ids:
            if not 0 <= token_id <= largest:
                raise _out_of_range("stop_token_ids", token_id, f"ids of 0 to {largest}")


def _out_of_range(field: str, value: object, allowed: str) -> RequestError:
    return RequestError(f"{field} is {value}; allowed: {allowed}.", param=field, code="invalid_value")
