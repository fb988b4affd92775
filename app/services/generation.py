"""From an API request to text: tokenise, submit, turn tokens back into text, count."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec

from app.engine_host import EngineHost
from app.errors import InterruptedAnswerError
from app.history.request_info import (
    KIND_API,
    MayKeepText,
    NoRequestSink,
    RequestInfo,
    RequestOutput,
    RequestSink,
    always,
)
from app.request_stream import RequestStream, StreamFailure
from app.services.key_limits import KeyLimits, Place
from app.services.stop_strings import StopMatcher
from app.services.workers import DeadlineError, Workers, WorkersLostError
from engine.errors import RequestError
from engine.records import TokenOutput
from engine.sampling_params import SamplingParams
from engine.scheduling.validation import make_context_length_error
from engine.sequence import EngineRequest, FinishReason

if TYPE_CHECKING:  # these modules import the tokenizer libraries, which only the engine thread does
    from engine.model.detokenizer import IncrementalDetokenizer
    from engine.model.tokenizer import Tokenizer

CLIENT_GONE = "client_gone"
SEED_BITS = 53

NUM_TEXT_WORKERS = 2
NUM_TEMPLATE_WORKERS = 2
MAX_WAITING_CALLS = 512
"""Requests that may wait for each kind of worker; one holds at most a body."""

TEMPLATE_DEADLINE_S = 5.0
"""Rendering a chat takes milliseconds; a template that takes longer than this may never end."""

T = TypeVar("T")


@dataclass(frozen=True)
class GenerationSpec:
    """A validated API request.

    Either `messages` (a chat, one prompt) or `prompts` (texts or token ids) is given. Every prompt gets
    `num_choices` answers; answer j of prompt i has choice index i * num_choices + j. `kind` (one of
    `request_info.KINDS`), `conversation_id` and `may_keep_text` are for the history alone. `priority`: lower
    is more urgent. `client`: whose limit of open requests this one counts against, None where there is none.
    """

    request_id: str
    sampling_params: SamplingParams
    num_choices: int = 1
    messages: list[dict[str, str]] | None = None
    prompts: list[str | list[int]] | None = None
    kind: str = KIND_API
    conversation_id: str | None = None
    may_keep_text: MayKeepText = always
    priority: int = 0
    client: bytes | None = None


@dataclass(frozen=True)
class ChoiceDelta:
    """New text of one choice; `finish_reason` is set on its last one."""

    index: int
    text: str
    finish_reason: str | None


@dataclass(frozen=True)
class Usage:
    """Token counts of a request, over all its choices; a prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class _Choice:
    """Text of one choice as it grows."""

    def __init__(self, detokenizer: "IncrementalDetokenizer", stops: tuple[str, ...]) -> None:
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.finish_reason: str | None = None
        self._pieces: list[str] = []
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)

    @property
    def has_ended(self) -> bool:
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def push(self, output: TokenOutput) -> ChoiceDelta:
        """Take one step's token; return the text that may be sent, and how the choice ends if it does."""
        text = ""
        self.num_cached_tokens = output.num_cached_tokens
        if output.token_id >= 0:
            self.num_tokens += 1
            # A token that ends the answer is counted, but it is no text.
            if output.finish_reason != FinishReason.STOP:
                text = self._detokenizer.push(output.token_id)
        if output.finish_reason is not None:
            text += self._detokenizer.finish()
        text, has_stopped = self._matcher.push(text)
        if has_stopped:
            self.finish_reason = FinishReason.STOP.value
        elif output.finish_reason is not None:
            text += self._matcher.finish()
            self.finish_reason = str(output.finish_reason)
        self._pieces.append(text)
        return ChoiceDelta(output.choice_index, text, self.finish_reason)


class Generation:
    """A request that the engine has taken. Whoever holds it must `close` it, on every way out."""

    def __init__(
        self,
        host: EngineHost,
        on_close: Callable[[RequestOutput], None],
        stream: RequestStream,
        choices: list[_Choice],
        prompt_lengths: list[int],
    ) -> None:
        """Made by `GenerationService.start`; `on_close` is called once, when it is closed."""
        self.request_id = stream.request_id
        self._host = host
        self._on_close = on_close
        self._is_closed = False
        self._stream = stream
        self._choices = choices
        self._prompt_lengths = prompt_lengths

    @property
    def num_choices(self) -> int:
        """Answers that are being made, over all prompts."""
        return len(self._choices)

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended as it should."""
        return all(choice.has_ended for choice in self._choices)

    async def next_deltas(self) -> list[ChoiceDelta]:
        """Return new text, waiting for some; an empty list when all choices have ended.

        May be cancelled (by a timeout) and called again without losing text. Raises
        `InterruptedAnswerError` when the answer cannot be completed.
        """
        deltas: list[ChoiceDelta] = []
        while not deltas and not self.is_complete:
            outputs = await self._stream.take()
            if not outputs:
                raise _interrupted(self._stream.failure)
            for output in outputs:
                self._push(output, deltas)
        return deltas

    def close(self) -> None:
        """End the request if it still runs and free what it holds. Safe to repeat, never waits."""
        self._host.release(self.request_id)
        self._stream.fail(StreamFailure(CLIENT_GONE, "The client has left."))
        if not self._is_closed:
            self._is_closed = True
            self._on_close(self._describe_output())

    def make_usage(self) -> Usage:
        """Return the token counts so far."""
        choices_per_prompt = len(self._choices) // len(self._prompt_lengths)
        return Usage(
            prompt_tokens=sum(self._prompt_lengths),
            completion_tokens=sum(choice.num_tokens for choice in self._choices),
            cached_tokens=sum(choice.num_cached_tokens for choice in self._choices[::choices_per_prompt]),
        )

    def _describe_output(self) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            texts=[choice.text for choice in self._choices],
            num_tokens=[choice.num_tokens for choice in self._choices],
            finish_reasons=[choice.finish_reason for choice in self._choices],
        )

    def _push(self, output: TokenOutput, deltas: list[ChoiceDelta]) -> None:
        if output.finish_reason in {FinishReason.ERROR, FinishReason.ABORT}:
            return  # the stream's failure says why; `next_deltas` raises it
        choice = self._choices[output.choice_index]
        if choice.has_ended:
            return  # computed before the engine heard of the stop string
        delta = choice.push(output)
        if delta.finish_reason is not None and output.finish_reason is None:
            self._host.stop_choice(self.request_id, delta.index)
        if delta.text or delta.finish_reason is not None:
            deltas.append(delta)


class GenerationService:
    """Starts generations on one engine.

    Text work runs off the event loop, chat templates apart from everything else: they are code from the
    model's files, and one that never ends must not take completions with it.
    """

    def __init__(
        self, host: EngineHost, sink: RequestSink | None = None, limits: KeyLimits | None = None
    ) -> None:
        """Serve from `host`; `sink` is told of every request that reaches the engine."""
        self._host = host
        self._sink = sink or NoRequestSink()
        self._limits = limits or KeyLimits(0)
        self._text_workers = Workers(
            "pageglass-text", num_workers=NUM_TEXT_WORKERS, max_waiting=MAX_WAITING_CALLS
        )
        self._template_workers = Workers(
            "pageglass-template", num_workers=NUM_TEMPLATE_WORKERS, max_waiting=MAX_WAITING_CALLS
        )

    async def call_text_worker(self, function: Callable[[], T]) -> T:
        """Return what `function` returns, called off the event loop; raises `QueueFullError`."""
        return await self._text_workers.run(function)

    async def count_chat_tokens(self, messages: list[dict[str, str]]) -> int:
        """Return how many tokens a chat has as a prompt; for one that can never fit, at least how many.

        Raises `RequestError`, `QueueFullError`, `UnavailableError`.
        """
        self._host.check_available()
        tokenizer, config = self._host.tokenizer, self._host.config
        assert tokenizer is not None, "an available engine has a tokenizer"  # noqa: S101
        assert config is not None, "and a configuration"  # noqa: S101
        pieces = await self._render(tokenizer, messages)
        least = -(-sum(map(len, pieces)) // tokenizer.max_token_chars)
        if least > config.max_model_len:
            return least
        return len(await self._text_workers.run(partial(tokenizer.encode_rendered, pieces)))

    async def start(self, spec: GenerationSpec) -> Generation:
        """Tokenise (off the event loop) and submit; returns when the engine has taken the request.

        Raises `RequestError` naming the field at fault, `QueueFullError`, `UnavailableError`.
        """
        self._host.check_available()
        place = self._limits.take(spec.client)
        try:
            return await self._start(spec, place)
        except BaseException:  # the client's leaving included
            place.give_back()
            raise

    async def _start(self, spec: GenerationSpec, place: Place) -> Generation:
        tokenizer = self._host.tokenizer
        assert tokenizer is not None, "an available engine has a tokenizer"  # noqa: S101
        spec.sampling_params.validate(tokenizer.vocab_size)
        prompts = await self._tokenise(tokenizer, spec)
        sampling_params = spec.sampling_params
        if sampling_params.seed is None:
            sampling_params = msgspec.structs.replace(sampling_params, seed=secrets.randbits(SEED_BITS))
        requests = [
            EngineRequest(
                request_id=spec.request_id,
                prompt_token_ids=prompt,
                sampling_params=sampling_params,
                choice_index=index * spec.num_choices + choice,
                priority=spec.priority,
            )
            for index, prompt in enumerate(prompts)
            for choice in range(spec.num_choices)
        ]
        info = _describe_request(spec, sampling_params, len(prompts))
        self._sink.describe(info)
        try:
            stream = await self._host.submit(requests)
        except BaseException as error:  # as above: nobody would withdraw it later
            self._sink.withdraw(spec.request_id)
            if isinstance(error, RequestError) and spec.messages is not None and error.param == "prompt":
                error.param = "messages"
            raise

        def on_close(output: RequestOutput) -> None:
            place.give_back()
            self._sink.add_output(info, output)

        choices = [_Choice(tokenizer.make_detokenizer(), sampling_params.stop) for _ in requests]
        return Generation(self._host, on_close, stream, choices, [len(prompt) for prompt in prompts])

    async def _tokenise(self, tokenizer: "Tokenizer", spec: GenerationSpec) -> list[list[int]]:
        """Return the ids of all prompts; texts that can never fit are refused before any work on them."""
        if spec.messages is not None:
            pieces = await self._render(tokenizer, spec.messages)
            self._check_text(sum(map(len, pieces)), "messages")
            return [await self._text_workers.run(partial(tokenizer.encode_rendered, pieces))]
        prompts = spec.prompts or []
        for prompt in prompts:
            if isinstance(prompt, str):
                self._check_text(len(prompt), "prompt")
            else:
                self._check_length(len(prompt), "prompt")
        if not any(isinstance(prompt, str) for prompt in prompts):
            return [prompt for prompt in prompts if not isinstance(prompt, str)]
        return await self._text_workers.run(partial(_encode_prompts, tokenizer, prompts))

    async def _render(self, tokenizer: "Tokenizer", messages: list[dict[str, str]]) -> list[str]:
        try:
            return await self._template_workers.run(
                partial(tokenizer.render_chat, messages), deadline_s=TEMPLATE_DEADLINE_S
            )
        except DeadlineError:
            message = f"The model's chat template took longer than {TEMPLATE_DEADLINE_S:g} s"
        except WorkersLostError:
            message = "The model's chat template does not end"
        raise RequestError(
            f"{message}; use /v1/completions.", param="messages", code="chat_template_error"
        ) from None

    def _check_text(self, num_chars: int, param: str) -> None:
        assert self._host.tokenizer is not None  # noqa: S101 - as in `start`
        # Each token stands for `max_token_chars` characters at most.
        self._check_length(-(-num_chars // self._host.tokenizer.max_token_chars), param, "at least ")

    def _check_length(self, num_tokens: int, param: str, prefix: str = "") -> None:
        assert self._host.config is not None  # noqa: S101 - as in `start`
        max_model_len = self._host.config.max_model_len
        if num_tokens > max_model_len:
            raise make_context_length_error(f"{prefix}{num_tokens}", max_model_len, param=param)


def _describe_request(spec: GenerationSpec, sampling_params: SamplingParams, num_prompts: int) -> RequestInfo:
    return RequestInfo(
        request_id=spec.request_id,
        kind=spec.kind,
        conversation_id=spec.conversation_id,
        sampling_params=sampling_params,
        num_choices=spec.num_choices,
        num_prompts=num_prompts,
        messages=spec.messages,
        prompts=spec.prompts,
        may_keep_text=spec.may_keep_text,
        priority=spec.priority,
    )


def _encode_prompts(tokenizer: "Tokenizer", prompts: list[str | list[int]]) -> list[list[int]]:
    return [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]


def _interrupted(failure: StreamFailure | None) -> InterruptedAnswerError:
    if failure is None:
        return InterruptedAnswerError("The answer ended early.", code="interrupted")
    return InterruptedAnswerError(failure.message, code=failure.code)
