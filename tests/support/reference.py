"""When two greedy texts differ: was it a tie? Judged by the same model and weights in `transformers`.

A disagreement counts only if the reference model prefers one token clearly: floating-point sums in another
order may swap two tokens whose logits are all but equal.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from app.model_store import DEFAULT_MODEL, resolve_model

MIN_GAP = 1e-3
MAX_TOKENS = 64

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Oracle:
    """What judging needs of a model."""

    encode: Callable[[Messages], list[int]]
    decode: Callable[[list[int]], str]
    rank: Callable[[list[int]], list[tuple[int, float]]]
    """The two best next tokens after some token ids, with their logits."""
    end_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Disagreement:
    """Where two texts part, and how sure the reference is there."""

    position: int
    gap: float

    @property
    def counts(self) -> bool:
        """Whether one of the texts is wrong."""
        return self.gap >= MIN_GAP


def judge(oracle: Oracle, messages: Messages, texts: tuple[str, str]) -> Disagreement:
    """Find the token at which one of two different greedy texts leaves the reference's way."""
    assert texts[0] != texts[1]
    prompt, answer = oracle.encode(messages), list[int]()
    while len(answer) < MAX_TOKENS:
        (best, best_logit), (_, second_logit) = oracle.rank(prompt + answer)
        answer.append(best)
        so_far = oracle.decode(answer).rstrip("\ufffd")
        if best in oracle.end_token_ids or not all(text.startswith(so_far) for text in texts):
            return Disagreement(len(answer) - 1, best_logit - second_logit)
    raise AssertionError(f"the reference agrees with both of {texts}")


@cache
def load_oracle() -> Oracle:
    """Load the default model in `transformers`, in fp32. Takes a while, so only when texts differ."""
    import torch  # noqa: PLC0415 - seconds of import that a run without differences does not pay
    import transformers  # noqa: PLC0415 - as above

    path = resolve_model(DEFAULT_MODEL)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = importlib.import_module("tests.support.models").load_reference(path)

    def encode(messages: Messages) -> list[int]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def rank(token_ids: list[int]) -> list[tuple[int, float]]:
        with torch.inference_mode():
            logits = model(torch.tensor([token_ids])).logits[0, -1]
        best = torch.topk(logits, 2)
        return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))

    def decode(token_ids: list[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=True))

    return Oracle(encode, decode, rank, frozenset({tokenizer.eos_token_id}))
