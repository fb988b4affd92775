"""From the times at which tokens came to figures. Imports nothing but the standard library."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.common import Figures, percentile
from bench.workload import Prompt


@dataclass
class Answer:
    """When one request was due and when its pieces came, in seconds of one clock; `num_new` counts tokens."""

    due_s: float
    num_new: int = 0
    pieces_s: list[float] = field(default_factory=list)


def figures_of(case: str, prompts: Sequence[Prompt], answers: Sequence[Answer], started_s: float) -> Figures:
    """Return the figures of one run. Raises `RuntimeError` if an answer is not as long as it should be.

    W1 gives `first_token_ms` and `decode_tok_s`; the others `seconds`, `output_tok_s`, `total_tok_s`, and
    percentiles of the time to the first piece and between pieces (usually one token each), over all requests.
    """
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        if answer.num_new != prompt.num_new:
            raise RuntimeError(f"request {number} gave {answer.num_new} tokens instead of {prompt.num_new}")
    if case == "W1":
        times = answers[0].pieces_s
        tokens_after_first = answers[0].num_new - 1
        return {
            "first_token_ms": (times[0] - answers[0].due_s) * 1e3,
            "decode_tok_s": tokens_after_first / (times[-1] - times[0]),
        }
    seconds = max(answer.pieces_s[-1] for answer in answers) - started_s
    first_ms = [(answer.pieces_s[0] - answer.due_s) * 1e3 for answer in answers]
    gaps_ms = [
        (later - earlier) * 1e3
        for answer in answers
        for earlier, later in zip(answer.pieces_s, answer.pieces_s[1:], strict=False)
    ]
    return {
        **throughput(prompts, seconds),
        "first_token_p50_ms": percentile(first_ms, 50),
        "first_token_p99_ms": percentile(first_ms, 99),
        "inter_token_p50_ms": percentile(gaps_ms, 50),
        "inter_token_p99_ms": percentile(gaps_ms, 99),
    }


def throughput(prompts: Sequence[Prompt], seconds: float) -> Figures:
    """Return what can be said when nothing but the whole duration is known."""
    num_new = sum(prompt.num_new for prompt in prompts)
    num_prompt = sum(len(prompt.token_ids) for prompt in prompts)
    return {
        "seconds": seconds,
        "output_tok_s": num_new / seconds,
        "total_tok_s": (num_prompt + num_new) / seconds,
    }
