"""Requests for an engine with a tiny model, and a run of them to the end, for tests of every runner."""

import random
from collections import Counter

from engine.core import EngineCore
from engine.records import Admitted, BlockOpKind, Loaded, Preempted, StepResult
from engine.sampling_params import SamplingParams
from engine.sequence import EngineRequest
from tests.support.models import VOCAB_SIZE

NUM_TOKENS = 20
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)


def make_requests(seed: int) -> list[EngineRequest]:
    """Return twelve, greedy and drawn, that begin in one of two ways."""
    rng = random.Random(seed)
    prefixes = [rng.choices(range(VOCAB_SIZE), k=24) for _ in range(2)]
    kinds = [
        GREEDY,
        SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=5),
        SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, top_p=0.9, top_k=50, seed=-9),
    ]
    return [
        EngineRequest(
            request_id=str(i),
            prompt_token_ids=[*rng.choice(prefixes), *rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 30))],
            sampling_params=kinds[i % len(kinds)],
        )
        for i in range(12)
    ]


def run(core: EngineCore, requests: list[EngineRequest]) -> tuple[dict[str, list[int]], list[StepResult]]:
    """Run requests to the end and check the books; return the tokens of each, and all steps."""
    core.add_requests(requests)
    answers: dict[str, list[int]] = {request.request_id: [] for request in requests}
    results = []
    while core.has_work:
        results.append(core.step())
        for output in results[-1].outputs:
            answers[output.request_id].append(output.token_id)
    core.check_integrity()
    return answers, results


def count_host_events(results: list[StepResult]) -> Counter[str]:
    """Count what a host tier is there for, and blocks reserved ahead."""
    counts: Counter[str] = Counter()
    for result in results:
        for event in result.record.events:
            counts["swaps"] += isinstance(event, Preempted) and event.mode == "swap"
            counts["loads"] += isinstance(event, Loaded)
            counts["host hits"] += (
                isinstance(event, Admitted) and not event.resumed and event.num_host_tokens > 0
            )
        counts["copies out"] += sum(op.kind == BlockOpKind.SWAP_OUT for op in result.record.block_ops)
        counts["lookahead"] += sum(op.kind == BlockOpKind.LOOKAHEAD for op in result.record.block_ops)
    return counts
