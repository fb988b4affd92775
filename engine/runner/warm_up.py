"""What a runner computes before the first request: to have all ready, and to learn what a token costs."""

import time

from engine.config import EngineConfig
from engine.runner.base import ModelRunner
from engine.sampling_params import SamplingParams
from engine.scheduling.output import ScheduledSequence, SchedulerOutput
from engine.sequence import EngineRequest, Sequence

_WARM_UP_TOKENS = 16
_FIRST_MEASURED_TOKENS = 16
_MOST_MEASURED_TOKENS = 64
_MOST_CHUNKS = 4
_FEWEST_CHUNKS = 2
_MEASURING_NS = 150_000_000


def make_text(token_ids: list[int], block_table: list[int]) -> Sequence:
    """Return a sequence that belongs to no request of anybody."""
    request = EngineRequest(
        request_id="", prompt_token_ids=token_ids, sampling_params=SamplingParams(temperature=0.0)
    )
    sequence = Sequence(0, request, max_tokens=1)
    sequence.block_table = block_table
    return sequence


def warm_up(runner: ModelRunner, max_tokens: int) -> None:
    """Compute a few tokens, prefill and then one more; overwrites the first block.

    `max_tokens`: what a block holds, or a sequence if that is less.
    """
    num_tokens = min(_WARM_UP_TOKENS, max_tokens)
    sequence = make_text([0] * num_tokens, [0])
    for start, count in ((0, num_tokens - 1), (num_tokens - 1, 1)):
        if count:
            runner.execute(SchedulerOutput([ScheduledSequence(sequence, start, count)]))


def measure_token_ns(runner: ModelRunner, config: EngineConfig) -> float:
    """Return what computing a token of a prompt takes; overwrites the first blocks.

    The best of several chunks, since whatever else the machine does makes some of them slow. A short one
    first; the others as long as the best one so far says that there is time for.
    """
    most = min(_MOST_MEASURED_TOKENS, config.max_num_batched_tokens, config.max_model_len)
    least = count = min(_FIRST_MEASURED_TOKENS, most)
    best_ns, num_tokens, num_chunks = float("inf"), 0, 0
    # By the time that all would have taken at the best speed: chunks that were slow must not cut it short.
    while num_chunks < _FEWEST_CHUNKS or (num_chunks < _MOST_CHUNKS and num_tokens * best_ns < _MEASURING_NS):
        # One token more than is computed: nothing is sampled, as in the middle of a prompt.
        sequence = make_text([0] * (count + 1), list(range(-(-count // config.block_size))))
        started_ns = time.perf_counter_ns()
        runner.execute(SchedulerOutput([ScheduledSequence(sequence, 0, count)]))
        duration_ns = time.perf_counter_ns() - started_ns
        best_ns = min(best_ns, duration_ns / count)
        num_tokens += count
        num_chunks += 1
        share_ns = _MEASURING_NS / (_MOST_CHUNKS - 1)  # of each chunk after the first
        count = most if best_ns * most <= share_ns else max(least, int(share_ns / best_ns))
    return best_ns
