"""Recorded requests for pages and programs: lists, one with its life, per-second sums of a session."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import msgspec

from app.db.database import Database
from app.engine_host import EngineHost
from app.errors import HistoryUnavailableError, NotInHistoryError
from app.services.metric_rows import Metrics, read_metrics
from app.services.request_life import ChoiceLife, LifeReader, Phase, make_phases
from app.services.request_rows import (
    RequestFacts,
    RequestFilter,
    WholeRequest,
    read_request,
    read_requests,
)
from app.services.session_replay import copy
from app.services.sessions import SessionReader

MAX_STEPS = 4096
"""Steps of a request that are read at once."""

MAX_WAIT_STEPS = 1024
"""Steps before a request's admission in which it is told why it waited."""

_READ_STEPS = 256


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice: phases from its events, the rest from the step records that were read.

    `has_token_ids`: whether the ids in it are known. `texts` has one entry per token, or is None where they
    are not known. `num_prefill_tokens`: those that were computed of the prompt at its first admission.
    """

    index: int
    seq_id: int
    finish_reason: str | None
    phases: list[Phase]
    life: ChoiceLife
    num_prefill_tokens: int
    has_token_ids: bool
    texts: list[str] | None


class StepRange(msgspec.Struct, frozen=True, kw_only=True):
    """Which steps of a request were read: `first` to `last`; `next` is where to go on, None at the end.

    `missing`: ranges in it that are not recorded. `reason`: why nothing could be read, else empty.
    """

    first: int
    last: int
    next: int | None
    missing: list[tuple[int, int]]
    reason: str


class RequestLife(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of a request."""

    request: WholeRequest
    choices: list[Choice]
    steps: StepRange


class OpenRequests(Protocol):
    """Knows the open requests of the running session as the engine has them now."""

    def current(self, request_id: str) -> dict[str, Any] | None:
        """Return what changes in a request's row, as it is now; None if it is not open."""

    def open_ids(self, min_tokens: int) -> list[str]:
        """Return the requests that have so many tokens now, prompt and answer together."""


class RequestReader:
    """Lives on the event loop. Everything may raise `HistoryUnavailableError`, and `NotInHistoryError`."""

    def __init__(
        self,
        database: Database,
        sessions: SessionReader,
        host: EngineHost,
        running_session: str,
        running: OpenRequests,
    ) -> None:
        """Read from `database`; `host` has the tokenizer of the session `running_session`.

        Rows are as of the last event of their requests; `running` brings open ones up to now.
        """
        self._database = database
        self._sessions = sessions
        self._host = host
        self._running_session = running_session
        self._running = running

    async def list_requests(
        self, wanted: RequestFilter, limit: int, before: tuple[int, str] | None = None
    ) -> list[RequestFacts]:
        """Return the newest requests, or the newest before `before` (arrival in ns, id)."""
        long_ids = self._running.open_ids(wanted.min_tokens) if wanted.min_tokens else []
        async with self._database.read() as db:
            found = await read_requests(db, wanted, limit, before, long_ids)
        return [self._refresh(facts) for facts in found]

    async def get(self, request_id: str) -> WholeRequest:
        """Return a request with its texts and events."""
        async with self._database.read() as db:
            whole = await read_request(db, request_id)
        return msgspec.structs.replace(whole, facts=self._refresh(whole.facts))

    def _refresh(self, facts: RequestFacts) -> RequestFacts:
        """Return what is known now of a request; what has ended meanwhile says so when that is written."""
        values = self._running.current(facts.id) if facts.is_open else None
        return msgspec.structs.replace(facts, **values) if values is not None else facts

    async def metrics(
        self, session_id: str, first_second: int | None, end_second: int | None, points: int
    ) -> Metrics:
        """Return per-second sums in [first_second, end_second), merged into at most `points` spans."""
        await self._sessions.facts(session_id)
        async with self._database.read() as db:
            return await read_metrics(db, session_id, first_second, end_second, points)

    async def life(self, request_id: str, from_step: int | None = None) -> RequestLife:
        """Return a request with up to `MAX_STEPS` of its steps.

        By default from its arrival, or from `MAX_WAIT_STEPS` before its admission.
        """
        request = await self.get(request_id)
        facts = request.facts
        seq_ids = {event.choice_index: event.seq_id for event in request.events if event.seq_id >= 0}
        lives = [ChoiceLife(choice_index=index, seq_id=seq_id) for index, seq_id in sorted(seq_ids.items())]
        if lives:
            steps = await self._read_steps(facts, lives, from_step)
        else:
            first = facts.arrived_step
            steps = StepRange(first=first, last=first - 1, next=None, missing=[], reason="")
        choices = [await self._make_choice(request, life, steps) for life in lives]
        return RequestLife(request=request, choices=choices, steps=steps)

    async def _read_steps(
        self, facts: RequestFacts, lives: list[ChoiceLife], from_step: int | None
    ) -> StepRange:
        """Fill `lives` from the step records; what cannot be read is said, not raised."""
        first = max(facts.arrived_step, from_step or 0)
        walk = _Walk(self._sessions, facts, lives)
        try:
            session = await self._sessions.facts(facts.session_id)
            recorded = session.last_step
            last = recorded if facts.ended_step is None else facts.ended_step
            if from_step is None:
                admitted = last if facts.admitted_step is None else facts.admitted_step
                first = max(first, admitted - MAX_WAIT_STEPS)
            end = min(last, recorded, first + MAX_STEPS - 1)
            await walk.run(first, end)
        except (HistoryUnavailableError, NotInHistoryError) as error:
            return StepRange(first=first, last=first - 1, next=None, missing=[], reason=str(error))
        if end == recorded < last and not session.is_running:
            walk.note_missing(end + 1, last)
            last = recorded
        # In the running session the newest steps may be on their way to the file.
        following = end + 1 if end < last else None
        return StepRange(first=first, last=end, next=following, missing=walk.missing, reason="")

    async def _make_choice(self, request: WholeRequest, life: ChoiceLife, steps: StepRange) -> Choice:
        events = [event for event in request.events if event.choice_index == life.choice_index]
        facts = request.facts
        reasons = [event.detail["reason"] for event in events if event.kind == "finished"]
        texts = await self._read_texts(request, life, steps)
        # In a session that kept no texts for a while, ids are missing where nothing vouches for them.
        has_ids = request.texts is not None and (request.records_text or texts is not None)
        return Choice(
            index=life.choice_index,
            seq_id=life.seq_id,
            finish_reason=reasons[-1] if reasons else None,
            phases=make_phases(events, facts.ended_step, facts.ended_ns),
            life=life,
            num_prefill_tokens=sum(
                event.detail["num_tokens"]
                - event.detail["num_cached_tokens"]
                - event.detail.get("num_host_tokens", 0)  # not recorded while there was no host tier
                for event in events
                if event.kind == "admitted"
            ),
            has_token_ids=has_ids,
            texts=texts,
        )

    async def _read_texts(
        self, request: WholeRequest, life: ChoiceLife, steps: StepRange
    ) -> list[str] | None:
        """Return the text of each token, None if this server's tokenizer may not be the one they are of."""
        tokenizer = self._host.tokenizer
        starts_at_0 = bool(life.tokens) and life.tokens[0].index == 0
        if request.texts is None or tokenizer is None or not starts_at_0 or steps.missing:
            return None
        token_ids = [token.token_id for token in life.tokens]
        texts = await self._sessions.call_worker(partial(_detokenise, tokenizer.make_detokenizer, token_ids))
        if request.facts.session_id == self._running_session and request.records_text:
            return texts
        outputs = request.texts.outputs or []
        told = outputs[life.choice_index] if life.choice_index < len(outputs) else ""
        whole = "".join(texts)
        is_same = bool(told) and bool(whole) and (whole.startswith(told) or told.startswith(whole))
        return texts if is_same else None


class _Detokenizer(Protocol):
    def push(self, token_id: int) -> str: ...


def _detokenise(make_detokenizer: Callable[[], _Detokenizer], token_ids: Iterable[int]) -> list[str]:
    detokenizer = make_detokenizer()
    return [detokenizer.push(token_id) for token_id in token_ids]


class _Walk:
    """Through the steps of a request, over what is missing."""

    def __init__(self, sessions: SessionReader, facts: RequestFacts, lives: list[ChoiceLife]) -> None:
        self._sessions = sessions
        self._facts = facts
        self._lives = lives
        self._reader: LifeReader | None = None
        self.missing: list[tuple[int, int]] = []

    async def run(self, first: int, end: int) -> None:
        """Read steps `first` to `end`."""
        following = first
        while following <= end:
            last = min(end, following + _READ_STEPS - 1)
            records = await self._sessions.records(self._facts.session_id, following, last)
            while records:
                await self._reach(following, records[0].step)
                assert self._reader is not None  # noqa: S101 - `_reach` has seen to it
                num_taken = await self._sessions.call_worker(partial(self._reader.take, records))
                records, following = records[num_taken:], self._reader.step + 1
            if following <= last:
                self.note_missing(following, last)
                following = last + 1

    async def _reach(self, following: int, step: int) -> None:
        """Have a reader whose next record is `step`."""
        if step > following:
            self.note_missing(following, step - 1)
        if self._reader is not None and self._reader.step == step - 1:
            return
        shared = await self._sessions.snapshot_at(self._facts.session_id, step - 1)
        snapshot = await self._sessions.call_worker(partial(copy, shared))
        if self._reader is None:
            self._reader = LifeReader(snapshot, self._lives, self._facts.arrived_ns)
        else:
            self._reader.resume(snapshot)

    def note_missing(self, first: int, last: int) -> None:
        """Steps `first` to `last` are not recorded."""
        if self.missing and self.missing[-1][1] == first - 1:
            self.missing[-1] = (self.missing[-1][0], last)
        else:
            self.missing.append((first, last))
