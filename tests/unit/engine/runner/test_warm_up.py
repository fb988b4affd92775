"""What a token costs is learnt from texts that fit, and quickly."""

import time

import pytest

from engine.config import EngineConfig
from engine.runner.base import ModelRunnerOutput
from engine.runner.fake import FakeRunner
from engine.runner.warm_up import measure_token_ns, warm_up
from engine.scheduling.output import SchedulerOutput


class TimedRunner(FakeRunner):
    """Takes, on a clock of its own, as long as `cost` says for so many tokens; notes how many they were."""

    def __init__(self, config: EngineConfig, cost: dict[int, int]) -> None:
        super().__init__(config.num_blocks, config.block_size)
        self.cost = cost
        self.chunks: list[int] = []
        self.now_ns = 0

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        output = super().execute(scheduler_output)
        [entry] = scheduler_output.scheduled
        assert not entry.needs_sampling
        self.chunks.append(entry.num_scheduled_tokens)
        self.now_ns += self.cost[entry.num_scheduled_tokens]
        return output


def measure(
    monkeypatch: pytest.MonkeyPatch, config: EngineConfig, cost_ms: dict[int, int]
) -> tuple[float, list[int]]:
    runner = TimedRunner(config, {tokens: ms * 1_000_000 for tokens, ms in cost_ms.items()})
    monkeypatch.setattr(time, "perf_counter_ns", lambda: runner.now_ns)
    return measure_token_ns(runner, config), runner.chunks


CONFIG = EngineConfig(num_blocks=16, max_model_len=256)
COST_MS = {16: 8, 32: 12, 64: 16, 128: 32}


def test_the_best_of_growing_chunks_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure(monkeypatch, CONFIG, COST_MS) == (250_000, [16, 32, 64, 128])


def test_a_slow_model_is_measured_with_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure(monkeypatch, CONFIG, {16: 41}) == (41e6 / 16, [16])
    assert measure(monkeypatch, CONFIG, {16: 20, 32: 32}) == (1e6, [16, 32])


@pytest.mark.parametrize(
    ("config", "chunks"),
    [
        (EngineConfig(num_blocks=4, max_model_len=50), [16, 32, 50]),
        (EngineConfig(max_num_batched_tokens=20, max_num_seqs=1), [16, 20]),
        (EngineConfig(num_blocks=1, block_size=2, max_model_len=2), [2]),
        (EngineConfig(num_blocks=2, block_size=1, max_model_len=2), [2]),
    ],
)
def test_no_chunk_is_longer_than_what_fits(
    monkeypatch: pytest.MonkeyPatch, config: EngineConfig, chunks: list[int]
) -> None:
    assert measure(monkeypatch, config, dict.fromkeys(chunks, 1))[1] == chunks


@pytest.mark.parametrize("block_size", [1, 2, 16, 256])
def test_warming_up_needs_one_block(block_size: int) -> None:
    runner = FakeRunner(1, block_size)
    warm_up(runner, block_size)
    assert set(runner._kv) == {(0, offset) for offset in range(min(16, block_size))}
