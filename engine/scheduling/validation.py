"""What is refused before it is queued: requests that could never be served."""

from engine.config import MAX_PRIORITY, EngineConfig
from engine.errors import ContextLengthError, RequestError
from engine.sequence import EngineRequest


def check_request(request: EngineRequest, config: EngineConfig, vocab_size: int) -> None:
    """Raise `RequestError` naming the field, `ContextLengthError` for a prompt that does not fit."""
    request.sampling_params.validate(vocab_size)
    token_ids = request.prompt_token_ids
    if not token_ids:
        raise RequestError("The prompt has no tokens.", param="prompt", code="invalid_value")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise RequestError(
            f"The prompt has token ids outside 0 to {vocab_size - 1}.", param="prompt", code="invalid_value"
        )
    if abs(request.priority) > MAX_PRIORITY:
        raise RequestError(
            f"priority is {request.priority}; allowed: -{MAX_PRIORITY} to {MAX_PRIORITY}.",
            param="priority",
            code="invalid_value",
        )
    if len(token_ids) >= config.max_model_len:
        raise make_context_length_error(str(len(token_ids)), config.max_model_len)


def make_context_length_error(
    num_tokens: str, max_model_len: int, *, param: str = "prompt"
) -> ContextLengthError:
    """Return the error for a prompt that leaves no room for one token; `num_tokens` is how many it has."""
    return ContextLengthError(
        f"The prompt has {num_tokens} tokens; at most {max_model_len - 1} fit, "
        f"since prompt and answer together are limited to {max_model_len}.",
        param=param,
        code="context_length_exceeded",
    )
