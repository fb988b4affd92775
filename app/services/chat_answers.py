"""One answer of the playground while it is being written, by a task that no connection owns."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from app.engine_host import EngineHost
from app.errors import InterruptedAnswerError, describe_error
from app.history.request_info import KIND_CHAT
from app.services.chat_trace import ChatTraces, Progress
from app.services.chat_types import CONTEXT_CODE, AnswerStats, Conversation, Message, MessageStatus
from app.services.generation import CLIENT_GONE, Generation, GenerationService, GenerationSpec
from app.services.priorities import Priorities
from engine.errors import ContextLengthError
from engine.sequence import FinishReason

logger = logging.getLogger(__name__)

SAVE_S: Final = 1.0
"""A growing text is kept at most so often: what a crash costs."""

_SHUTDOWN_TEXT: Final = "The server stopped before the answer was complete."


@dataclass(frozen=True)
class Engine:
    """What answers are made with."""

    host: EngineHost
    generations: GenerationService
    traces: ChatTraces
    priorities: Priorities


class Answer:
    """Writes `message`; readers look at its text and wait for `changed`."""

    def __init__(
        self,
        engine: Engine,
        conversation: Conversation,
        message: Message,
        *,
        save: Callable[[Message], None],
        is_stored: Callable[[], bool],
    ) -> None:
        """Nothing runs before `start`; `save` is told when the message should be kept.

        `is_stored` says whether the conversation is, with the texts of its requests.
        """
        self.message = message
        self.changed = asyncio.Event()
        """Set at the next change; every change makes a new one."""
        self._engine = engine
        self._conversation = conversation
        self._params = conversation.params.to_sampling_params()
        self._priority = conversation.params.priority
        self._save = save
        self._is_stored = is_stored
        self._saved_at = time.monotonic()
        self._generation: Generation | None = None
        self._finish_reason: str | None = None
        self._is_stop_asked = False
        assert message.request_id is not None  # noqa: S101 - answers have one
        self._request_id = message.request_id
        self._trace = engine.traces.follow(self._request_id)
        self.task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin in the background."""
        self.task = asyncio.create_task(self._run(), name=f"chat {self._request_id}")
        self.task.add_done_callback(self._on_done)

    def stop(self) -> None:
        """End it where it is, as somebody asked for; safe to repeat."""
        self._is_stop_asked = True
        if self._generation is not None:
            self._generation.close()
        elif self.task is not None:
            self.task.cancel()

    @property
    def progress(self) -> Progress:
        """How far it is."""
        return self._trace.make_progress(self._engine.traces.step)

    async def _run(self) -> None:
        try:
            await self._generate()
        except asyncio.CancelledError:
            if self._is_stop_asked:
                self._end(MessageStatus.STOPPED)
            else:
                self._end(MessageStatus.INTERRUPTED, _SHUTDOWN_TEXT)
                raise
        except InterruptedAnswerError as error:
            if self._is_stop_asked and error.code == CLIENT_GONE:
                self._end(MessageStatus.STOPPED)
            else:
                self._end(MessageStatus.INTERRUPTED, str(error), error.code)
        except ContextLengthError as error:
            what = (
                "The conversation has outgrown" if self._conversation.sent_turns() else "This is longer than"
            )
            self._end(MessageStatus.FAILED, f"{what} the context. {error}", CONTEXT_CODE)
        except Exception as error:
            info = describe_error(error)
            if info.code == "internal_error":
                logger.exception("The answer to a chat failed")
            self._end(MessageStatus.FAILED, info.message, info.code)

    def _on_done(self, _: asyncio.Task[None]) -> None:
        if self.message.is_streaming:  # cancelled before it ran at all
            if self._is_stop_asked:
                self._end(MessageStatus.STOPPED)
            else:
                self._end(MessageStatus.INTERRUPTED, _SHUTDOWN_TEXT)

    async def _generate(self) -> None:
        spec = GenerationSpec(
            request_id=self._request_id,
            sampling_params=self._params,
            messages=self._conversation.make_prompt(),
            kind=KIND_CHAT,
            conversation_id=self._conversation.id,
            may_keep_text=self._is_stored,
            priority=self._engine.priorities.find(self._priority),
        )
        async with self._engine.host.preparing():
            generation = self._generation = await self._engine.generations.start(spec)
        try:
            while deltas := await generation.next_deltas():
                for delta in deltas:
                    self.message.text += delta.text
                    self._finish_reason = delta.finish_reason
                self._tell()
                self._save_now_and_then()
        finally:
            generation.close()
        self._end(MessageStatus.COMPLETE)

    def _save_now_and_then(self) -> None:
        now = time.monotonic()
        if self._is_stored() and now - self._saved_at >= SAVE_S:
            self._saved_at = now
            self._save(self.message)

    def _end(self, status: MessageStatus, error: str | None = None, code: str | None = None) -> None:
        self.message.stats = self._make_stats(code)
        self.message.status, self.message.error = status, error
        self._engine.traces.forget(self._request_id)
        self._save(self.message)
        self._tell()

    def _make_stats(self, code: str | None) -> AnswerStats:
        stats = msgspec.structs.replace(
            self._trace.make_stats(), finish_reason=self._finish_reason, error_code=code
        )
        if self._generation is None:
            return stats
        usage = self._generation.make_usage()
        # The engine may have gone a token further than the answer, until it heard of a stop.
        stats = msgspec.structs.replace(
            stats,
            num_prompt_tokens=usage.prompt_tokens,
            num_cached_tokens=usage.cached_tokens,
            num_output_tokens=usage.completion_tokens,
        )
        config = self._engine.host.config
        is_full = (
            config is not None
            and self._finish_reason == FinishReason.LENGTH
            and usage.prompt_tokens + usage.completion_tokens >= config.max_model_len
        )
        return msgspec.structs.replace(stats, is_context_full=is_full)

    def _tell(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()
