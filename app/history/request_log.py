"""Keeps one row for every request and one for every moment of its life, as they happen.

All numbers come from the step records; what only the caller of the engine knows (texts, why it was asked)
comes through `RequestSink`.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgspec
from sqlalchemy import bindparam, select, update
from sqlalchemy.dialects.sqlite import insert

from app.db.models import RequestEventRow, RequestRow, RequestTextRow
from app.db.writer import HistoryWriter
from app.db.writes import Turn, Write
from app.history.crash_repair import INTERRUPTED, OPEN_STATUSES
from app.history.lost_requests import LostRequests
from app.history.recorder import TextSwitch
from app.history.request_info import KIND_API, RequestInfo, RequestOutput, encode_params
from app.history.request_state import OpenChoice, OpenRequest, most_severe
from engine.config import EngineConfig
from engine.records import (
    Admitted,
    Arrived,
    Event,
    Finished,
    Policies,
    Preempted,
    Rejected,
    Reset,
    StepRecord,
)
from engine.sequence import FinishReason
from engine.snapshot import EngineSnapshot

MAX_UNBORN: Final = 4096
"""Requests that were described and never seen in a record; the oldest are forgotten."""

_INSERT_REQUEST: Final = insert(RequestRow).on_conflict_do_nothing()
_INSERT_TEXT: Final = insert(RequestTextRow).on_conflict_do_nothing()
_INSERT_EVENT: Final = insert(RequestEventRow)
_UPDATE_REQUEST: Final = update(RequestRow).where(RequestRow.id == bindparam("row_id"))
_PUT_REQUEST: Final = insert(RequestRow).on_conflict_do_update(
    index_elements=[RequestRow.id],
    set_={name: insert(RequestRow).excluded[name] for name in OpenRequest("", 0, 0, None).to_values(None)},
)
_END_SESSION: Final = (
    update(RequestRow)
    .where(RequestRow.session_id == bindparam("session"), RequestRow.status.in_(OPEN_STATUSES))
    .values(status=INTERRUPTED, ended_step=bindparam("step"), ended_ns=bindparam("t_ns"))
)
_UPDATE_TEXT: Final = update(RequestTextRow).where(
    RequestTextRow.request_id == bindparam("row_id"),
    select(RequestRow.arrived_step).where(RequestRow.id == bindparam("row_id")).scalar_subquery()
    > bindparam("silent_step"),
)
"""Of an answer that was partly made while texts were not kept, nothing is kept."""

_ROW_BYTES: Final = 400
"""What a row without texts takes in the queue, about."""


class RequestLog:
    """A `RecordPart` and a `RequestSink`."""

    def __init__(self, session_id: str, writer: HistoryWriter, text: TextSwitch) -> None:
        """Write to `writer`; texts only while `text` is on."""
        self._session_id = session_id
        self._writer = writer
        self._text = text
        self._unborn: dict[str, RequestInfo] = {}
        self._requests: dict[str, OpenRequest] = {}
        self._choices: dict[int, OpenChoice] = {}
        self._awaiting: dict[int, OpenChoice] = {}
        """Those whose next token is a moment of its own: the first one, or the first after a preemption."""
        self._cut: set[str] = set()
        self._num_events = 0
        self._last_ns = 0
        self._last_step = 0
        self._silent_step = 0  # the last one while texts were not kept
        self._snapshot: EngineSnapshot | None = None
        self._batch = _Batch()
        self._lost = LostRequests(self._put_again)

    # ---------------------------------------------------------------- from the caller of the engine

    def describe(self, info: RequestInfo) -> None:
        """Take what is known before the engine gets the request."""
        self._unborn[info.request_id] = info if self._text.is_on else info.without_texts()
        while len(self._unborn) > MAX_UNBORN:
            del self._unborn[next(iter(self._unborn))]

    def withdraw(self, request_id: str) -> None:
        """The request was refused; its texts are not needed."""
        info = self._unborn.get(request_id)
        if info is not None:
            # Its refusal is still to come, in a record.
            self._unborn[request_id] = info.without_texts()

    def add_output(self, info: RequestInfo, output: RequestOutput) -> None:
        """Take what was delivered; it counts where the engine has computed more."""
        writes = []
        if self._may_keep_text(info) and any(output.texts):
            outputs = msgspec.json.encode(output.texts).decode()
            row = {"row_id": output.request_id, "outputs": outputs, "silent_step": self._silent_step}
            writes.append(Write(_UPDATE_TEXT, [row], num_bytes=len(outputs), turn=Turn.OUTPUT))
        reasons = [reason for reason in output.finish_reasons if reason is not None]
        if len(reasons) == len(output.finish_reasons):
            request = self._requests.get(output.request_id) or self._lost.get(output.request_id)
            values: dict[str, Any] = {
                "num_output_tokens": sum(output.num_tokens),
                "finish_reason": most_severe(reasons),
            }
            if request is not None:
                request.delivered = values
            else:
                row = {"row_id": output.request_id, **values}
                lose = partial(self._lost.add_values, output.request_id, values)
                writes.append(replace(_make_write(_UPDATE_REQUEST, [row], turn=Turn.DELIVERY), on_lost=lose))
        if writes:
            self._writer.put(*writes)

    def interrupt(self, request_ids: Collection[str]) -> None:
        """The server stops and ends these itself: nobody aborts them, their aborts are to come in records."""
        self._cut.update(request_ids)

    def current(self, request_id: str) -> dict[str, Any] | None:
        """Return what changes in an open request's row, as it is now; None if it is not open."""
        request, snapshot = self._requests.get(request_id), self._newest_state()
        return request.to_values(snapshot) if request is not None and snapshot is not None else None

    def open_ids(self, min_tokens: int) -> list[str]:
        """Return the open requests that have so many tokens now, prompt and answer together."""
        snapshot = self._newest_state()
        if snapshot is None:
            return []
        return [
            request_id
            for request_id, request in self._requests.items()
            if request.num_prompt_tokens + request.to_values(snapshot)["num_output_tokens"] >= min_tokens
        ]

    def _newest_state(self) -> EngineSnapshot | None:
        """Return the state that belongs to `_requests`; None once recording has failed and lags behind it."""
        snapshot = self._snapshot
        return snapshot if snapshot is not None and snapshot.step == self._last_step else None

    # ---------------------------------------------------------------- from the step records

    def on_open(self, config: EngineConfig) -> None:
        """Nothing is needed of the engine's settings."""

    def on_record(self, record: StepRecord, snapshot: EngineSnapshot) -> None:
        """Put the rows of all that happened to requests in one step."""
        end_ns = record.t_ns + record.schedule_ns + record.forward_ns + record.sample_ns + record.host_ns
        self._last_ns, self._last_step = end_ns, record.step
        self._snapshot = snapshot
        if not self._text.is_on:
            self._silent_step = record.step
        if not record.events and not self._awaiting:
            return
        batch = self._batch = _Batch()
        endings = [event for event in record.events if not self._begin(event, record)]
        self._take_tokens(record, end_ns)
        self._end(endings, record, end_ns)
        for request in batch.changed.values():
            batch.updates.append(request.to_update(snapshot))
        self._put(batch)

    def on_close(self) -> None:
        """Mark what the end of the server cut off."""
        batch, snapshot = _Batch(), self._newest_state()
        for request in self._requests.values():
            request.end(INTERRUPTED, self._last_step, self._last_ns)
            values = request.to_update(snapshot)
            if snapshot is None:
                del values["num_output_tokens"]  # not known; what the row has is nearer to it
            batch.updates.append(values)
            batch.touch(request)
        self._put(batch)
        self._requests.clear()
        self._lost.close()
        # Those that were forgotten have an end too.
        end = {"session": self._session_id, "step": self._last_step, "t_ns": self._last_ns}
        self._writer.put(Write(_END_SESSION, [end]))

    def _begin(self, event: Event, record: StepRecord) -> bool:
        """Take an event that comes before the step's tokens; return whether it was one."""
        match event:
            case Arrived():
                self._arrive(event, record.step)
            case Admitted():
                self._admit(event, record)
            case Preempted():
                self._preempt(event, record)
            case _:
                return False
        return True

    def _end(self, events: list[Event], record: StepRecord, end_ns: int) -> None:
        """Take the other events."""
        computed = {entry.seq_id for entry in record.batch} if events else set()
        has_reset = any(isinstance(event, Reset) for event in events)
        for event in events:
            match event:
                case Finished():
                    t_ns = end_ns if event.seq_id in computed else record.t_ns
                    self._finish(event, record.step, t_ns, has_reset=has_reset)
                case Rejected():
                    self._reject(event, record)
                case Reset():
                    self._note_event(None, record.step, record.t_ns, "reset", {"error": event.error})
                case Policies():
                    policies = msgspec.structs.asdict(event)
                    self._note_event(None, record.step, record.t_ns, "policies", policies)

    def _arrive(self, event: Arrived, step: int) -> None:
        request = self._requests.get(event.request_id)
        if request is None:
            info = self._unborn.pop(event.request_id, None)
            request = OpenRequest(event.request_id, event.t_ns, step, info)
            self._requests[event.request_id] = request
            self._batch.born.append((request, info))
        choice = OpenChoice(request, event.choice_index, event.seq_id)
        request.add(choice, event)
        self._choices[event.seq_id] = choice
        detail = {"num_prompt_tokens": event.num_prompt_tokens, "max_tokens": event.max_tokens}
        self._note_event(choice, step, event.t_ns, "arrived", detail)

    def _admit(self, event: Admitted, record: StepRecord) -> None:
        choice = self._choices[event.seq_id]
        choice.request.admit(choice, event, record)
        self._awaiting[event.seq_id] = choice
        self._batch.touch(choice.request)
        detail = msgspec.structs.asdict(event)
        del detail["seq_id"], detail["resumed"]
        self._note_event(choice, record.step, record.t_ns, "resumed" if event.resumed else "admitted", detail)

    def _preempt(self, event: Preempted, record: StepRecord) -> None:
        choice = self._choices[event.seq_id]
        self._awaiting.pop(event.seq_id, None)
        choice.request.preempt(choice, event)
        self._batch.touch(choice.request)
        beneficiary = self._choices.get(event.beneficiary)
        detail = msgspec.structs.asdict(event)
        del detail["seq_id"], detail["candidates"]
        detail["beneficiary"] = beneficiary.request.request_id if beneficiary else None
        self._note_event(choice, record.step, record.t_ns, "preempted", detail)

    def _take_tokens(self, record: StepRecord, end_ns: int) -> None:
        if not self._awaiting:
            return
        for entry in record.batch:
            if entry.token_id < 0 or entry.seq_id not in self._awaiting:
                continue
            choice = self._awaiting.pop(entry.seq_id)
            if choice.has_tokens:
                self._note_event(choice, record.step, end_ns, "recomputed", {})
                continue
            choice.has_tokens = True
            # A sequence preempted in its prompt has its first token when it is back.
            self._note_event(choice, record.step, end_ns, "first_token", {})
            choice.request.take_first_token(record.step, end_ns)
            self._batch.touch(choice.request)

    def _finish(self, event: Finished, step: int, t_ns: int, *, has_reset: bool) -> None:
        choice = self._choices.pop(event.seq_id)
        self._awaiting.pop(event.seq_id, None)
        detail = {"reason": str(event.reason), "num_output_tokens": event.num_output_tokens}
        self._note_event(choice, step, t_ns, "finished", detail)
        request = choice.request
        if event.reason == FinishReason.ERROR:
            request.error_code = "engine_error" if has_reset else "model_error"
        if request.finish_choice(choice, event, step, t_ns):
            if request.ending == "aborted" and request.request_id in self._cut:
                request.ending = INTERRUPTED
            del self._requests[request.request_id]
        self._batch.touch(request)

    def _reject(self, event: Rejected, record: StepRecord) -> None:
        detail = {"code": event.code, "num_prompt_tokens": event.num_prompt_tokens}
        row = self._make_event(record.step, record.t_ns, "rejected", detail)
        row |= {"request_id": event.request_id, "choice_index": event.choice_index}
        self._batch.events.append(row)
        if event.request_id in self._requests:  # a second one of the same id
            return
        info = self._unborn.pop(event.request_id, None)
        request = OpenRequest(event.request_id, record.t_ns, record.step, info)
        request.reject(event, record)
        self._batch.born.append((request, None))

    def _note_event(
        self, choice: OpenChoice | None, step: int, t_ns: int, kind: str, detail: dict[str, Any]
    ) -> None:
        row = self._make_event(step, t_ns, kind, detail)
        if choice is not None:
            row["request_id"] = choice.request.request_id
            row["choice_index"], row["seq_id"] = choice.choice_index, choice.seq_id
        self._batch.events.append(row)

    def _make_event(self, step: int, t_ns: int, kind: str, detail: dict[str, Any]) -> dict[str, Any]:
        self._num_events += 1
        return {
            "session_id": self._session_id,
            "seq": self._num_events,
            "request_id": "",
            "choice_index": -1,
            "seq_id": -1,
            "step": step,
            "t_ns": t_ns,
            "kind": kind,
            "detail": msgspec.json.encode(detail).decode(),
        }

    def _put(self, batch: "_Batch") -> None:
        born = [self._make_row(request, info) for request, info in batch.born]
        texts = [row for _, info in batch.born if (row := self._make_text(info)) is not None]
        text_bytes = sum(len(row["prompt"]) for row in texts)
        writes = [
            _make_write(_INSERT_REQUEST, born, turn=Turn.REQUEST),
            _make_write(_INSERT_TEXT, texts, text_bytes, turn=Turn.TEXT),
            _make_write(_UPDATE_REQUEST, batch.updates, turn=Turn.CHANGE),
            _make_write(_INSERT_EVENT, batch.events, turn=Turn.EVENT),
        ]
        writes = [write for write in writes if write.rows]
        touched = [*(request for request, _ in batch.born), *batch.changed.values()]
        if touched:
            writes[0] = replace(writes[0], on_lost=partial(self._lose, touched))
        if writes:
            self._writer.put(*writes)

    def _lose(self, requests: list[OpenRequest]) -> None:
        for request in requests:
            if request.info is not None:
                request.info = request.info.without_texts()  # they may wait for long
        self._lost.add(requests)

    def _put_again(self, requests: list[OpenRequest], values: dict[str, dict[str, Any]]) -> bool:
        """Put rows that were lost as they are now; what is refused then is lost."""
        if not self._writer.has_room(_ROW_BYTES * (len(requests) + len(values))):
            return False
        snapshot = self._newest_state()
        rows = [{**self._make_row(request, None), **request.to_values(snapshot)} for request in requests]
        updates = [{"row_id": name, **changed} for name, changed in values.items()]
        writes = (_make_write(_PUT_REQUEST, rows), _make_write(_UPDATE_REQUEST, updates))
        return self._writer.put(*(write for write in writes if write.rows))

    def _make_row(self, request: OpenRequest, info: RequestInfo | None) -> dict[str, Any]:
        info = info or request.info
        return {
            "id": request.request_id,
            "session_id": self._session_id,
            "conversation_id": info.conversation_id if info else None,
            "kind": info.kind if info else KIND_API,
            "arrived_ns": request.arrived_ns,
            "arrived_step": request.arrived_step,
            "num_choices": request.num_choices,
            "max_tokens": request.max_tokens,
            "num_prompt_tokens": request.num_prompt_tokens,
            "priority": request.priority,
            "params": self._encode_params(info) if info else "{}",
            **request.to_values(None),
        }

    def _encode_params(self, info: RequestInfo) -> str:
        return encode_params(info.sampling_params, with_texts=self._may_keep_text(info))

    def _may_keep_text(self, info: RequestInfo) -> bool:
        return self._text.is_on and info.may_keep_text()

    def _make_text(self, info: RequestInfo | None) -> dict[str, Any] | None:
        if info is None or not self._may_keep_text(info):
            return None
        if info.messages is not None:
            prompt = msgspec.json.encode({"messages": info.messages})
        else:
            prompt = msgspec.json.encode({"prompts": info.prompts})
        return {"request_id": info.request_id, "prompt": prompt.decode(), "outputs": None}


class _Batch:
    """The rows of one record."""

    def __init__(self) -> None:
        self.born: list[tuple[OpenRequest, RequestInfo | None]] = []
        self.changed: dict[str, OpenRequest] = {}
        self.updates: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []

    def touch(self, request: OpenRequest) -> None:
        self.changed[request.request_id] = request


def _make_write(
    statement: Any, rows: Sequence[dict[str, Any]], num_extra_bytes: int = 0, *, turn: Turn | None = None
) -> Write:
    return Write(statement, rows, num_bytes=len(rows) * _ROW_BYTES + num_extra_bytes, turn=turn)
