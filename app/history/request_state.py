"""What is known of a request while it is open: the values of its row."""

from typing import Any, Final

from app.history.request_info import RequestInfo
from engine.records import Admitted, Arrived, Finished, Preempted, Rejected, StepRecord
from engine.sequence import FinishReason
from engine.snapshot import EngineSnapshot

_SEVERITY: Final = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR)
_STATUS: Final = {FinishReason.ABORT: "aborted", FinishReason.ERROR: "failed"}


def most_severe(reasons: list[str]) -> str:
    """Return the reason that says most about a request of several choices: error, abort, length, stop."""
    return max(reasons, key=lambda reason: _SEVERITY.index(FinishReason(reason)))


class OpenChoice:
    """One choice of an open request."""

    __slots__ = ("choice_index", "has_tokens", "num_tokens_before", "request", "seq_id")

    def __init__(self, request: "OpenRequest", choice_index: int, seq_id: int) -> None:
        """Start waiting."""
        self.request = request
        self.choice_index = choice_index
        self.seq_id = seq_id
        self.has_tokens = False
        self.num_tokens_before = 0
        """Tokens that were computed when it was last preempted."""


class OpenRequest:
    """One request over all its choices. Steps and times are those of the first choice that got there."""

    def __init__(self, request_id: str, arrived_ns: int, arrived_step: int, info: RequestInfo | None) -> None:
        """Start without choices."""
        self.request_id = request_id
        self.arrived_ns, self.arrived_step = arrived_ns, arrived_step
        self.info = info
        self.ending: str | None = None
        """Its status for good, None while it is open."""
        self.num_choices = info.num_choices * info.num_prompts if info else 0
        self.priority = info.priority if info else 0
        self.max_tokens = 0
        self.num_prompt_tokens = 0
        self.admitted_ns: int | None = None
        self.admitted_step: int | None = None
        self.first_token_ns: int | None = None
        self.first_token_step: int | None = None
        self.ended_ns: int | None = None
        self.ended_step: int | None = None
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        self.error_code: str | None = None
        self.delivered: dict[str, Any] | None = None
        """What the client got, where that is known: tokens and reason; it counts more than the engine's."""
        self._open: set[int] = set()
        self._in_slots: set[int] = set()
        self._num_ended_tokens = 0
        self._reasons: list[str] = []

    @property
    def status(self) -> str:
        """Waiting while none of its choices has a slot, also when they had some and were preempted."""
        return self.ending or ("running" if self._in_slots else "waiting")

    def add(self, choice: OpenChoice, event: Arrived) -> None:
        """Take in one choice; a prompt counts once, however many choices it has."""
        self._open.add(choice.seq_id)
        if self.info is None:
            self.num_choices += 1
        self.max_tokens = max(self.max_tokens, event.max_tokens)
        self.priority = event.priority
        if self._counts(choice.choice_index):
            self.num_prompt_tokens += event.num_prompt_tokens

    def admit(self, choice: OpenChoice, event: Admitted, record: StepRecord) -> None:
        """A choice has got its slot, for the first time or again."""
        self._in_slots.add(choice.seq_id)
        if self.admitted_ns is None:
            self.admitted_ns, self.admitted_step = record.t_ns, record.step
        num_found = event.num_cached_tokens + event.num_host_tokens
        if event.resumed:
            self.num_recomputed_tokens += max(0, choice.num_tokens_before - num_found)
        elif self._counts(choice.choice_index):
            self.num_cached_tokens += num_found

    def preempt(self, choice: OpenChoice, event: Preempted) -> None:
        """A choice has lost its slot and waits again."""
        choice.num_tokens_before = event.num_tokens_lost + event.num_tokens_kept
        self._in_slots.discard(choice.seq_id)
        self.num_preemptions += 1

    def take_first_token(self, step: int, t_ns: int) -> None:
        """A choice has its first token."""
        if self.first_token_ns is None:
            self.first_token_ns, self.first_token_step = t_ns, step

    def finish_choice(self, choice: OpenChoice, event: Finished, step: int, t_ns: int) -> bool:
        """End one choice; return whether it was the last."""
        self._open.discard(choice.seq_id)
        self._in_slots.discard(choice.seq_id)
        self._num_ended_tokens += event.num_output_tokens
        self._reasons.append(str(event.reason))
        if self._open:
            return False
        reason = FinishReason(most_severe(self._reasons))
        self.end(_STATUS.get(reason, "finished"), step, t_ns)
        return True

    def end(self, status: str, step: int, t_ns: int) -> None:
        """It has ended so, whatever of it is still open."""
        self.ending = status
        self.ended_ns, self.ended_step = t_ns, step

    def reject(self, event: Rejected, record: StepRecord) -> None:
        """The engine has refused it."""
        self.end("rejected", record.step, record.t_ns)
        self.num_choices = max(1, self.num_choices)
        self.max_tokens = (self.info.sampling_params.max_tokens if self.info else None) or 0
        self.num_prompt_tokens = event.num_prompt_tokens
        self.error_code = event.code

    def to_update(self, snapshot: EngineSnapshot | None) -> dict[str, Any]:
        """Return the row's new values with its id as `row_id`."""
        return {"row_id": self.request_id, **self.to_values(snapshot)}

    def to_values(self, snapshot: EngineSnapshot | None) -> dict[str, Any]:
        """Return all values that change while a request lives; `snapshot` knows the open choices' tokens."""
        num_open_tokens = 0
        if snapshot is not None:
            num_open_tokens = sum(snapshot.sequences[seq_id].num_output_tokens for seq_id in self._open)
        values = {
            "status": self.status,
            "admitted_ns": self.admitted_ns,
            "admitted_step": self.admitted_step,
            "first_token_ns": self.first_token_ns,
            "first_token_step": self.first_token_step,
            "ended_ns": self.ended_ns,
            "ended_step": self.ended_step,
            "num_cached_tokens": self.num_cached_tokens,
            "num_preemptions": self.num_preemptions,
            "num_recomputed_tokens": self.num_recomputed_tokens,
            "num_output_tokens": self._num_ended_tokens + num_open_tokens,
            "finish_reason": most_severe(self._reasons) if self._reasons and not self._open else None,
            "error_code": self.error_code,
        }
        if self.delivered is not None and self.ending == "finished":
            values |= self.delivered
        return values

    def _counts(self, choice_index: int) -> bool:
        return self.info is None or choice_index % self.info.num_choices == 0
