"""The history database: what is kept of every server run. The schema changes only through `migrations/`.

Times ending in `_ns` are Unix nanoseconds, sizes are bytes. Rows are written by `app.db.writer` alone and
read through `app.db.database.Database.read`.
"""

from typing import Final

from sqlalchemy import BigInteger, ForeignKey, Index, LargeBinary, MetaData, Text, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}
"""Constraints need names, or migrations could not change them."""


class Base(DeclarativeBase):
    """All tables."""

    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map = {int: BigInteger, str: Text, bytes: LargeBinary}  # noqa: RUF012 - SQLAlchemy's way


class SessionRow(Base):
    """One server run. `config` is the resolved `EngineConfig` as JSON, `engine` the `EngineInfo`.

    Both are null until the model is loaded, `engine` also in sessions of before it was recorded.

    Steps `first_step` to `last_step` are stored, less those in gaps; older ones were given up for space.
    `ended_how` is null while it runs, else `stopped` or `interrupted`. `records_text`: whether prompts,
    answers and token ids were kept all the time.
    """

    __tablename__ = "sessions"

    id: Mapped[str] = mapped_column(primary_key=True)
    started_ns: Mapped[int]
    ended_ns: Mapped[int | None]
    ended_how: Mapped[str | None]
    model_name: Mapped[str]
    config: Mapped[str | None]
    engine: Mapped[str | None]
    version: Mapped[str]
    records_text: Mapped[bool]
    first_step: Mapped[int] = mapped_column(default=1)
    last_step: Mapped[int] = mapped_column(default=0)
    num_lost_steps: Mapped[int] = mapped_column(default=0)
    note: Mapped[str] = mapped_column(default="")
    is_starred: Mapped[bool] = mapped_column(default=False)

    __table_args__ = (Index(None, "started_ns"),)


class ChunkRow(Base):
    """Whole step records `first_step` to `first_step + num_steps - 1`, encoded by `app.history.record_codec`.

    What is written every moment is small; once the aligned run of 256 steps is complete, one row replaces
    the small ones.
    """

    __tablename__ = "chunks"

    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id", ondelete="CASCADE"), primary_key=True)
    first_step: Mapped[int] = mapped_column(primary_key=True)
    num_steps: Mapped[int]
    first_ns: Mapped[int]
    last_ns: Mapped[int]
    records: Mapped[bytes]


class KeyframeRow(Base):
    """The engine's state after `step`, so that nothing has to be folded from the beginning.

    A cache, except where `is_base`: there the records before are missing (a gap, or given up for space).
    """

    __tablename__ = "keyframes"

    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id", ondelete="CASCADE"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    is_base: Mapped[bool]
    state: Mapped[bytes]


class RequestRow(Base):
    """One API request over all its choices, committed when the engine takes it and again when it ends.

    `status`: waiting (no choice has a slot), running, finished, aborted, failed, rejected, interrupted (the
    server ended).
    Steps and times are those of the first choice that got there, `ended_*` those of the last.
    `params` is JSON. `priority`: lower is more urgent.
    """

    __tablename__ = "requests"

    id: Mapped[str] = mapped_column(primary_key=True)
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id", ondelete="CASCADE"))
    conversation_id: Mapped[str | None]
    kind: Mapped[str]
    status: Mapped[str]
    arrived_ns: Mapped[int]
    admitted_ns: Mapped[int | None]
    first_token_ns: Mapped[int | None]
    ended_ns: Mapped[int | None]
    arrived_step: Mapped[int]
    admitted_step: Mapped[int | None]
    first_token_step: Mapped[int | None]
    ended_step: Mapped[int | None]
    num_choices: Mapped[int]
    max_tokens: Mapped[int]
    num_prompt_tokens: Mapped[int]
    num_cached_tokens: Mapped[int] = mapped_column(default=0)
    num_output_tokens: Mapped[int] = mapped_column(default=0)
    num_preemptions: Mapped[int] = mapped_column(default=0)
    num_recomputed_tokens: Mapped[int] = mapped_column(default=0)
    finish_reason: Mapped[str | None]
    error_code: Mapped[str | None]
    params: Mapped[str]
    priority: Mapped[int] = mapped_column(default=0, server_default=text("0"))

    __table_args__ = (
        Index(None, "arrived_ns", "id"),
        Index(None, "session_id", "arrived_step"),
        Index(None, "status"),
    )


class RequestTextRow(Base):
    """Prompt and answers of a request, unless recording of text was off.

    `prompt`: JSON, `{"messages": [...]}` or `{"prompts": [...]}`; `outputs`: JSON list, one text per choice.
    """

    __tablename__ = "request_texts"

    request_id: Mapped[str] = mapped_column(ForeignKey("requests.id", ondelete="CASCADE"), primary_key=True)
    prompt: Mapped[str]
    outputs: Mapped[str | None]


class RequestEventRow(Base):
    """One moment in a request's life.

    `kind`: arrived, admitted, first_token, preempted, resumed, recomputed (the first token after that),
    finished, rejected, reset, policies. `seq` counts per session; `detail` is JSON.
    """

    __tablename__ = "request_events"

    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id", ondelete="CASCADE"), primary_key=True)
    seq: Mapped[int] = mapped_column(primary_key=True)
    request_id: Mapped[str]
    choice_index: Mapped[int]
    seq_id: Mapped[int]
    step: Mapped[int]
    t_ns: Mapped[int]
    kind: Mapped[str]
    detail: Mapped[str]

    __table_args__ = (Index(None, "request_id"), Index(None, "session_id", "step"))


class ConversationRow(Base):
    """A chat of the playground. `params` is JSON: only what differs from the defaults."""

    __tablename__ = "conversations"

    id: Mapped[str] = mapped_column(primary_key=True)
    created_ns: Mapped[int]
    updated_ns: Mapped[int]
    title: Mapped[str]
    system_prompt: Mapped[str]
    params: Mapped[str]

    __table_args__ = (Index(None, "updated_ns"),)


class MessageRow(Base):
    """One turn, or one variant of an answer. `position` counts turns from 0, `variant` answers from 0.

    `status`: complete, streaming, stopped, failed, interrupted. `stats` is JSON: what is shown under an
    answer. `is_left_out`: a turn that is not sent to the model. `is_chosen`: of several variants the one
    that is shown and sent.
    """

    __tablename__ = "messages"

    id: Mapped[str] = mapped_column(primary_key=True)
    conversation_id: Mapped[str] = mapped_column(ForeignKey("conversations.id", ondelete="CASCADE"))
    position: Mapped[int]
    variant: Mapped[int]
    role: Mapped[str]
    text: Mapped[str]
    status: Mapped[str]
    error: Mapped[str | None]
    created_ns: Mapped[int]
    request_id: Mapped[str | None]
    session_id: Mapped[str | None]
    stats: Mapped[str]
    is_left_out: Mapped[bool] = mapped_column(default=False)
    is_chosen: Mapped[bool] = mapped_column(default=True)

    __table_args__ = (Index(None, "conversation_id", "position", "variant", unique=True),)


class MetricRow(Base):
    """What happened in one second of Unix time; only seconds with steps have a row.

    Token counts and events are sums, `num_running`, `num_waiting` and block counts those after the second's
    last step, `max_running` and `max_waiting` the most after any step of it, `step_ns` is the sum of step
    durations. TTFT and inter-token times are sums over the events of the second, with their number, so that
    averages over any span are exact.
    """

    __tablename__ = "metrics"

    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id", ondelete="CASCADE"), primary_key=True)
    second: Mapped[int] = mapped_column(primary_key=True)
    last_step: Mapped[int]
    num_steps: Mapped[int]
    step_ns: Mapped[int]
    max_step_ns: Mapped[int]
    num_prefill_tokens: Mapped[int]
    num_decode_tokens: Mapped[int]
    num_hit_tokens: Mapped[int]
    num_lookup_tokens: Mapped[int]
    num_arrived: Mapped[int]
    num_finished: Mapped[int]
    num_preemptions: Mapped[int]
    num_evictions: Mapped[int]
    num_running: Mapped[int]
    num_waiting: Mapped[int]
    max_running: Mapped[int]
    max_waiting: Mapped[int]
    num_free: Mapped[int]
    num_cached: Mapped[int]
    num_used: Mapped[int]
    ttft_ns: Mapped[int]
    num_ttft: Mapped[int]
    max_ttft_ns: Mapped[int]


METRIC_SUMS: Final = (
    "num_steps",
    "step_ns",
    "num_prefill_tokens",
    "num_decode_tokens",
    "num_hit_tokens",
    "num_lookup_tokens",
    "num_arrived",
    "num_finished",
    "num_preemptions",
    "num_evictions",
    "ttft_ns",
    "num_ttft",
)
METRIC_MAXIMA: Final = ("max_step_ns", "max_ttft_ns", "max_running", "max_waiting")
METRIC_NEWEST: Final = ("last_step", "num_running", "num_waiting", "num_free", "num_cached", "num_used")
"""How two rows of `MetricRow` become one: add, take the larger, take the later."""


class BookmarkRow(Base):
    """A step that somebody marked, with a note."""

    __tablename__ = "bookmarks"

    id: Mapped[str] = mapped_column(primary_key=True)
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id", ondelete="CASCADE"))
    step: Mapped[int]
    note: Mapped[str]
    created_ns: Mapped[int]

    __table_args__ = (Index(None, "session_id", "step"),)
