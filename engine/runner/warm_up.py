"""What a runner computes before the first request: to have all ready, and to learn what a token costs."""

import time

from engine.config import EngineConfig
from engine.runner.base import ModelRunner
from engine.sampling_params import SamplingParams
from engine.scheduling.output import ScheduledSequence, SchedulerOutput
from engine.sequence import EngineRequest, Sequence

_WARM_UP_TOKENS = 16
_FIRST_MEASURED_TOKENS = 16
_MOST_MEASURED_TOKENS = 128
_MEASURING_NS = 40_000_000


def make_text(token_ids: list[int], block_table: list[int]) -> Sequence:
    """Return a sequence that belongs to no request of anybody."""
    request = EngineRequest(
        request_id="", prompt_token_ids=token_ids, sampling_params=SamplingParams(temperature=0.0)
    )
    sequence = Sequence(0, request, max_tokens=1)
    sequence.block_table = block_table
    return sequence


def warm_up(runner: ModelRunner, block_size: int) -> None:
    """Compute a few tokens, prefill and then one more; overwrites the first block."""
    num_tokens = min(_WARM_UP_TOKENS, block_size)
    sequence = make_text([0] * num_tokens, [0])
    for start, count in ((0, num_tokens - 1), (num_tokens - 1, 1)):
        if count:
            runner.execute(SchedulerOutput([ScheduledSequence(sequence, start, count)]))


def measure_token_ns(runner: ModelRunner, config: EngineConfig) -> float:
    """Return what computing a token of a prompt takes; overwrites the first blocks.

    Chunks twice as long each time, until one was long enough to count or the largest has been computed; the
    best of them.
    """
    most = min(_MOST_MEASURED_TOKENS, config.max_num_batched_tokens, config.max_model_len)
    count, best_ns, spent_ns = min(_FIRST_MEASURED_TOKENS, most), float("inf"), 0
    while True:
        # One token more than is computed: nothing is sampled, as in the middle of a prompt.
        sequence = make_text([0] * (count + 1), list(range(-(-count // config.block_size))))
        started_ns = time.perf_counter_ns()
        runner.execute(SchedulerOutput([ScheduledSequence(sequence, 0, count)]))
        duration_ns = time.perf_counter_ns() - started_ns
        best_ns = min(best_ns, duration_ns / count)
        spent_ns += duration_ns
        if count == most or spent_ns > _MEASURING_NS:
            return best_ns
        count = min(2 * count, most)
