"""A model without arithmetic: its next token is scripted, or a hash of all before it."""

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from engine.runner.base import LocalRunner, ModelRunnerOutput
from engine.scheduling.output import SchedulerOutput
from engine.sequence import Sequence
from engine.simulate.pace import Pace
from engine.simulate.workload import END_TOKEN, VOCAB_SIZE, Ending, SimulatedRequest

_FACTOR, _MASK = 6_364_136_223_846_793_005, 2**64 - 1
"""A step of a linear congruential generator modulo 2^64 (Knuth, MMIX) takes one more token into the hash."""


@dataclass(slots=True)
class SimulatedClock:
    """The time that everything in a simulation goes by, in ns."""

    now_ns: int = 0

    def read(self) -> int:
        """Return the time."""
        return self.now_ns


@dataclass(slots=True)
class _Answer:
    """How far a sequence is: `value` is a hash of its first `num_hashed` tokens."""

    request: SimulatedRequest
    num_hashed: int = 0
    value: int = 0

    def next_token(self, sequence: Sequence) -> int:
        """Return the token after those that the sequence has."""
        request = self.request
        number = len(sequence.token_ids) - sequence.num_prompt_tokens
        if request.ending is Ending.MODEL and number + 1 >= request.num_output_tokens:
            return END_TOKEN
        if number < len(request.answer):
            return request.answer[number]
        return self._hash(sequence.token_ids)

    def _hash(self, token_ids: list[int]) -> int:
        if self.num_hashed == 0:
            digest = hashlib.blake2b(array("I", token_ids).tobytes(), digest_size=8).digest()
            self.value = int.from_bytes(digest, "little")
        else:
            for token_id in token_ids[self.num_hashed :]:
                self.value = (self.value * _FACTOR + token_id + 1) & _MASK
        self.num_hashed = len(token_ids)
        return (self.value >> 48) % VOCAB_SIZE


class SimulatedRunner(LocalRunner):
    """Stands in for a model; takes no time but that of `clock`."""

    vocab_size = VOCAB_SIZE + 1
    eos_token_ids = frozenset({END_TOKEN})

    def __init__(self, clock: SimulatedClock, pace: Pace, requests: Iterable[SimulatedRequest]) -> None:
        """Know what will be asked."""
        self._clock = clock
        self._pace = pace
        self._requests = {(request.request_id, request.choice_index): request for request in requests}
        self._answers: dict[int, _Answer] = {}
        self.stops: list[tuple[str, int]] = []
        """Request id and choice of those whose text has reached a stop string."""

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Give the tokens and let the time pass."""
        token_ids = [
            self._sample(entry.sequence) if entry.needs_sampling else -1
            for entry in scheduler_output.scheduled
        ]
        started_ns = self._clock.now_ns
        self._clock.now_ns, finished = self._pace.run(scheduler_output, started_ns)
        return ModelRunnerOutput(token_ids, self._clock.now_ns - started_ns, 0, finished)

    def _sample(self, sequence: Sequence) -> int:
        answer = self._answers.get(sequence.seq_id)
        if answer is None:
            request = self._requests[sequence.request_id, sequence.choice_index]
            answer = self._answers[sequence.seq_id] = _Answer(request)
        token_id = answer.next_token(sequence)
        request = answer.request
        if (
            request.ending is Ending.TEXT
            and request.leave_ns is None
            and sequence.num_output_tokens + 1 >= request.num_output_tokens
        ):
            self.stops.append((sequence.request_id, sequence.choice_index))
        return token_id

    def forget(self, seq_id: int) -> None:
        """Drop what is known of a sequence that has ended."""
        self._answers.pop(seq_id, None)

    def reset(self) -> None:
        """Nothing to forget: the tokens do not come from KV."""
