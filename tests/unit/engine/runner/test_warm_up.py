"""What a token costs is learnt from texts that fit, and quickly."""

import time

import pytest

from engine.config import EngineConfig
from engine.runner.base import ModelRunnerOutput
from engine.runner.fake import FakeRunner
from engine.runner.warm_up import measure_token_ns, warm_up
from engine.scheduling.output import SchedulerOutput


class TimedRunner(FakeRunner):
    """Takes, on a clock of its own, as long a token as `costs_ns` says of each chunk; notes their sizes."""

    def __init__(self, config: EngineConfig, costs_ns: list[int]) -> None:
        super().__init__(config.num_blocks, config.block_size)
        self.costs_ns = costs_ns
        self.chunks: list[int] = []
        self.now_ns = 0

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        output = super().execute(scheduler_output)
        [entry] = scheduler_output.scheduled
        assert not entry.needs_sampling
        self.now_ns += self.costs_ns[len(self.chunks)] * entry.num_scheduled_tokens
        self.chunks.append(entry.num_scheduled_tokens)
        return output


def measure(
    monkeypatch: pytest.MonkeyPatch, config: EngineConfig, costs_us: list[int]
) -> tuple[float, list[int], int]:
    """Return the microseconds a token that were measured, the sizes of the chunks, and the ms it all took."""
    runner = TimedRunner(config, [cost_us * 1000 for cost_us in costs_us])
    monkeypatch.setattr(time, "perf_counter_ns", lambda: runner.now_ns)
    cost_ns = measure_token_ns(runner, config)
    return cost_ns / 1000, runner.chunks, runner.now_ns // 1_000_000


CONFIG = EngineConfig(num_blocks=16, max_model_len=256)


@pytest.mark.parametrize(
    "costs_us",
    [
        [380, 380, 380, 380],
        [5700, 380, 380, 380],
        [380, 5700, 5700, 5700],
        [5700, 380, 830, 5700],
        [830, 5700, 380, 380],
        [830, 830, 830, 380],
        [4000, 4000, 380, 380],
        [830, 380, 5700, 5700],
    ],
)
def test_chunks_that_a_busy_machine_makes_slow_do_not_count(
    monkeypatch: pytest.MonkeyPatch, costs_us: list[int]
) -> None:
    assert measure(monkeypatch, CONFIG, costs_us)[0] == 380


@pytest.mark.parametrize(
    ("cost_us", "chunks", "spent_ms"),
    [
        (10, [16, 64, 64, 64], 2),
        (380, [16, 64, 64, 64], 79),
        (1000, [16, 50, 50, 50], 166),
        (3000, [16, 16, 16, 16], 192),
        (5000, [16, 16], 160),
        (100_000, [16, 16], 3200),
    ],
)
def test_the_slower_the_model_the_fewer_and_shorter_chunks_but_never_one(
    monkeypatch: pytest.MonkeyPatch, cost_us: int, chunks: list[int], spent_ms: int
) -> None:
    assert measure(monkeypatch, CONFIG, [cost_us] * 4) == (cost_us, chunks, spent_ms)


@pytest.mark.parametrize(
    ("config", "chunks"),
    [
        (EngineConfig(num_blocks=4, max_model_len=50), [16, 50, 50, 50]),
        (EngineConfig(max_num_batched_tokens=20, max_num_seqs=1), [16, 20, 20, 20]),
        (EngineConfig(num_blocks=1, block_size=2, max_model_len=2), [2, 2, 2, 2]),
        (EngineConfig(num_blocks=2, block_size=1, max_model_len=2), [2, 2, 2, 2]),
    ],
)
def test_no_chunk_is_longer_than_what_fits(
    monkeypatch: pytest.MonkeyPatch, config: EngineConfig, chunks: list[int]
) -> None:
    for cost_us in (1, 500_000):
        _, sizes, _ = measure(monkeypatch, config, [cost_us] * 4)
        assert all(size <= limit for size, limit in zip(sizes, chunks, strict=False))
    assert measure(monkeypatch, config, [1] * 4)[1] == chunks


def test_a_clock_that_does_not_move_measures_nothing_but_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure(monkeypatch, CONFIG, [0] * 4) == (0, [16, 64, 64, 64], 0)


@pytest.mark.parametrize("block_size", [1, 2, 16, 256])
def test_warming_up_needs_one_block(block_size: int) -> None:
    runner = FakeRunner(1, block_size)
    warm_up(runner, block_size)
    assert set(runner._kv) == {(0, offset) for offset in range(min(16, block_size))}
