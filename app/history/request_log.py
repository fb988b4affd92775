"""Keeps one row for every request and one for every moment of its life, as they happen.

All numbers come from the step records; what only the caller of the engine knows (texts, why it was asked)
comes through `RequestSink`.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from sqlalchemy import bindparam, update
from sqlalchemy.dialects.sqlite import insert

from app.db.models import RequestEventRow, RequestRow, RequestTextRow
from app.db.writer import HistoryWriter, Write
from app.history.recorder import TextSwitch
from app.history.request_info import KIND_API, RequestInfo, RequestOutput
from app.history.request_state import OpenChoice, OpenRequest, most_severe
from engine.config import EngineConfig
from engine.records import Admitted, Arrived, Event, Finished, Preempted, Rejected, Reset, StepRecord
from engine.sampling_params import SamplingParams
from engine.sequence import FinishReason
from engine.snapshot import EngineSnapshot

MAX_UNBORN: Final = 4096
"""Requests that were described and never seen in a record; the oldest are forgotten."""

_INSERT_REQUEST: Final = insert(RequestRow).on_conflict_do_nothing()
_INSERT_TEXT: Final = insert(RequestTextRow).on_conflict_do_nothing()
_INSERT_EVENT: Final = insert(RequestEventRow)
_UPDATE_REQUEST: Final = update(RequestRow).where(RequestRow.id == bindparam("row_id"))
_UPDATE_TEXT: Final = update(RequestTextRow).where(RequestTextRow.request_id == bindparam("row_id"))
_ROW_BYTES: Final = 400
"""What a row without texts takes in the queue, about."""

_SAMPLING_DEFAULTS: Final = SamplingParams()


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
        self._num_events = 0
        self._last_ns = 0
        self._last_step = 0
        self._batch = _Batch()

    # ---------------------------------------------------------------- from the caller of the engine

    def describe(self, info: RequestInfo) -> None:
        """Take what is known before the engine gets the request."""
        self._unborn[info.request_id] = info
        while len(self._unborn) > MAX_UNBORN:
            del self._unborn[next(iter(self._unborn))]

    def withdraw(self, request_id: str) -> None:
        """The request was refused; its texts are not needed."""
        info = self._unborn.get(request_id)
        if info is not None:
            # Its refusal is still to come, in a record.
            self._unborn[request_id] = _without_texts(info)

    def add_output(self, output: RequestOutput) -> None:
        """Take what was delivered; it counts where the engine has computed more."""
        writes = []
        if self._text.is_on and any(output.texts):
            outputs = msgspec.json.encode(output.texts).decode()
            row = {"row_id": output.request_id, "outputs": outputs}
            writes.append(Write(_UPDATE_TEXT, [row], num_bytes=len(outputs)))
        reasons = [reason for reason in output.finish_reasons if reason is not None]
        if len(reasons) == len(output.finish_reasons):
            request = self._requests.get(output.request_id)
            values: dict[str, Any] = {
                "num_output_tokens": sum(output.num_tokens),
                "finish_reason": most_severe(reasons),
            }
            if request is not None:
                request.delivered = values
            else:
                row = {"row_id": output.request_id, **values}
                writes.append(Write(_UPDATE_REQUEST, [row], num_bytes=_ROW_BYTES))
        if writes:
            self._writer.put(*writes)

    # ---------------------------------------------------------------- from the step records

    def on_open(self, config: EngineConfig) -> None:
        """Nothing is needed of the engine's settings."""

    def on_record(self, record: StepRecord, snapshot: EngineSnapshot) -> None:
        """Put the rows of all that happened to requests in one step."""
        end_ns = record.t_ns + record.schedule_ns + record.forward_ns + record.sample_ns + record.host_ns
        self._last_ns, self._last_step = end_ns, record.step
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
        batch = self._batch = _Batch()
        for request in self._requests.values():
            request.status = "interrupted"
            request.ended_ns, request.ended_step = self._last_ns, self._last_step
            batch.updates.append(request.to_update(None))
        self._put(batch)
        self._requests.clear()

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
        detail = {
            "slot": event.slot,
            "num_tokens": event.num_tokens,
            "num_cached_tokens": event.num_cached_tokens,
        }
        self._note_event(choice, record.step, record.t_ns, "resumed" if event.resumed else "admitted", detail)

    def _preempt(self, event: Preempted, record: StepRecord) -> None:
        choice = self._choices[event.seq_id]
        self._awaiting.pop(event.seq_id, None)
        choice.request.num_preemptions += 1
        self._batch.touch(choice.request)
        beneficiary = self._choices.get(event.beneficiary)
        detail = {
            "slot": event.slot,
            "policy": event.policy,
            "mode": event.mode,
            "num_tokens_lost": event.num_tokens_lost,
            "num_blocks_freed": event.num_blocks_freed,
            "beneficiary": beneficiary.request.request_id if beneficiary else None,
            "num_candidates": len(event.candidates),
        }
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
            _make_write(_INSERT_REQUEST, born),
            _make_write(_INSERT_TEXT, texts, text_bytes),
            _make_write(_UPDATE_REQUEST, batch.updates),
            _make_write(_INSERT_EVENT, batch.events),
        ]
        writes = [write for write in writes if write.rows]
        if writes:
            self._writer.put(*writes)

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
            "params": _encode_params(info.sampling_params, with_texts=self._text.is_on) if info else "{}",
            **request.to_values(None),
        }

    def _make_text(self, info: RequestInfo | None) -> dict[str, Any] | None:
        if info is None or not self._text.is_on:
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


def _make_write(statement: Any, rows: Sequence[dict[str, Any]], num_extra_bytes: int = 0) -> Write:
    return Write(statement, rows, num_bytes=len(rows) * _ROW_BYTES + num_extra_bytes)


def _without_texts(info: RequestInfo) -> RequestInfo:
    return RequestInfo(
        request_id=info.request_id,
        kind=info.kind,
        conversation_id=info.conversation_id,
        sampling_params=info.sampling_params,
        num_choices=info.num_choices,
        num_prompts=info.num_prompts,
        messages=None,
        prompts=None,
    )


def _encode_params(params: SamplingParams, *, with_texts: bool) -> str:
    """Return what differs from the defaults; stop strings are texts."""
    values = {
        name: value
        for name, value in msgspec.structs.asdict(params).items()
        if value != getattr(_SAMPLING_DEFAULTS, name) and (with_texts or name != "stop")
    }
    return msgspec.json.encode(values).decode()
