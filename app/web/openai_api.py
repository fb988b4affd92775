"""The OpenAI-compatible API under `/v1`."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from litestar import Controller, Request, Response, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath

from app.engine_host import EngineHost
from app.errors import ModelNotFoundError
from app.request_labels import REQUEST_ID_HEADER, find_label
from app.services.generation import GenerationService
from app.services.priorities import Priorities
from app.web.clients import identify_client
from app.web.openai_requests import IgnoredFields, ParsedRequest, parse_chat, parse_completion, read_json
from app.web.openai_responses import EventStream, make_format, make_whole_answer, until_client_leaves
from app.web.schemas import ChatCompletionBody, GenerationBody

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 4 * 2**20
MAX_INLINE_BYTES = 64 * 2**10
"""A larger body is parsed off the event loop."""

OWNER = "pageglass"

AnyRequest = Request[Any, Any, Any]


class OpenAIController(Controller):
    """Models, chat completions and text completions."""

    path = "/v1"
    tags = ("openai",)
    request_max_body_size = MAX_BODY_BYTES

    @get("/models", operation_id="listModels", summary="The model that is served")
    async def list_models(
        self, host: NamedDependency[EngineHost], model_created: NamedDependency[int]
    ) -> dict[str, Any]:
        """List the one model; 503 while it loads."""
        host.check_available()
        return {"object": "list", "data": [_describe_model(host, model_created)]}

    @get("/models/{model_id:path}", operation_id="getModel", summary="One model")
    async def get_model(
        self, model_id: FromPath[str], host: NamedDependency[EngineHost], model_created: NamedDependency[int]
    ) -> dict[str, Any]:
        """Describe the model by its name."""
        _check_model(host, model_id.removeprefix("/"))
        host.check_available()
        return _describe_model(host, model_created)

    @post("/chat/completions", status_code=200, operation_id="createChatCompletion", summary="Answer a chat")
    async def create_chat_completion(
        self,
        request: AnyRequest,
        host: NamedDependency[EngineHost],
        generations: NamedDependency[GenerationService],
        ignored_fields: NamedDependency[IgnoredFields],
        priorities: NamedDependency[Priorities],
    ) -> Response[bytes]:
        """Answer a chat, whole or as a stream."""
        answerer = _Answerer(host, generations, ignored_fields, priorities)
        return await answerer.answer(request, parse_chat)

    @post("/completions", status_code=200, operation_id="createCompletion", summary="Continue a text")
    async def create_completion(
        self,
        request: AnyRequest,
        host: NamedDependency[EngineHost],
        generations: NamedDependency[GenerationService],
        ignored_fields: NamedDependency[IgnoredFields],
        priorities: NamedDependency[Priorities],
    ) -> Response[bytes]:
        """Continue one or more prompts, whole or as a stream."""
        answerer = _Answerer(host, generations, ignored_fields, priorities)
        return await answerer.answer(request, parse_completion)


Parse = Callable[[bytes], ParsedRequest[GenerationBody]]


@dataclass(frozen=True)
class _Answerer:
    """From a request to the response that answers it, or begins to."""

    host: EngineHost
    generations: GenerationService
    ignored_fields: IgnoredFields
    priorities: Priorities

    async def answer(self, request: AnyRequest, parse: Parse) -> Response[bytes]:
        async with self.host.preparing():
            parsed = await self._parse(await read_json(request), parse)
            self.ignored_fields.add(parsed.ignored)
            body = parsed.body
            _check_model(self.host, body.model)
            spec = replace(
                parsed.spec,
                priority=self.priorities.find(body.priority),
                client=identify_client(request, body.user),
            )
            async with until_client_leaves(request.receive):
                generation = await self.generations.start(spec)
        options = body.stream_options
        answer = make_format(
            body.model,
            is_chat=isinstance(body, ChatCompletionBody),
            include_usage=options is not None and options.include_usage is True,
        )
        label = find_label(request.headers.get(REQUEST_ID_HEADER, ""))
        logger.debug("%s begins, the caller calls it %r", spec.request_id, label)
        if body.stream:
            return EventStream(generation, answer, label)
        return await make_whole_answer(request, generation, answer, label)

    async def _parse(self, raw: bytes, parse: Parse) -> ParsedRequest[GenerationBody]:
        if len(raw) <= MAX_INLINE_BYTES:
            return parse(raw)
        return await self.generations.call_text_worker(partial(parse, raw))


def _check_model(host: EngineHost, name: str) -> None:
    if name != host.model_name:
        raise ModelNotFoundError(
            f"The model {name[:128]!r} is not served here; this server has {host.model_name!r}.",
            param="model",
            code="model_not_found",
        )


def _describe_model(host: EngineHost, created: int) -> dict[str, Any]:
    config, tokenizer = host.config, host.tokenizer
    return {
        "id": host.model_name,
        "object": "model",
        "created": created,
        "owned_by": OWNER,
        "max_model_len": None if config is None else config.max_model_len,
        "vocab_size": None if tokenizer is None else tokenizer.vocab_size,
    }
