import pytest

from bench.device.engines import drive
from bench.device.load import FULL, TINY, Load, engine_config, load_of, shortened, sweep
from engine.core import EngineCore
from engine.records import Preempted
from engine.runner.cuda_graphs import list_buckets
from engine.runner.fake import FakeRunner

pytestmark = pytest.mark.unit


def test_the_load_is_the_same_each_time_and_within_its_bounds() -> None:
    prompts = FULL.prompts(151_936)
    assert prompts == FULL.prompts(151_936)
    assert len(prompts) == 256
    lengths = [len(prompt.token_ids) for prompt in prompts]
    assert (min(lengths) >= 100, max(lengths) <= 1024) == (True, True)
    assert all(100 <= prompt.num_new <= 1024 for prompt in prompts)
    assert 500 < sum(lengths) / 256 < 620
    assert max(token_id for prompt in prompts for token_id in prompt.token_ids) < 151_936


def test_lengths_do_not_depend_on_the_vocabulary() -> None:
    assert load_of(is_tiny=True) is TINY
    one, other = FULL.prompts(1000), FULL.prompts(2000)
    assert [prompt.num_new for prompt in one] == [prompt.num_new for prompt in other]


@pytest.mark.parametrize("load", [TINY, Load(64, (10, 200), (30, 100), 512)])
def test_all_requests_run_together_without_preemption(load: Load) -> None:
    prompts = load.prompts(500)
    limits = engine_config(load, prompts)
    runner = FakeRunner(limits.num_blocks, limits.block_size, vocab_size=500)
    run = drive(EngineCore(limits, runner), prompts)
    assert run.is_complete
    assert not any(isinstance(event, Preempted) for record in run.records for event in record.events)
    assert [len(run.answers[str(i)]) for i in range(len(prompts))] == [prompt.num_new for prompt in prompts]
    assert max(len(record.batch) for record in run.records) == load.num_requests


@pytest.mark.parametrize("load", [TINY, FULL])
def test_a_sweep_needs_every_size_of_a_decode_step(load: Load) -> None:
    limits = engine_config(load, load.prompts(500))
    runner = FakeRunner(limits.num_blocks, limits.block_size, vocab_size=500)
    run = drive(EngineCore(limits, runner), sweep(load.num_requests))
    sizes = {len(record.batch) for record in run.records}
    buckets = list_buckets(load.num_requests)
    for smaller, bucket in zip([0, *buckets], buckets, strict=False):
        assert any(smaller < size <= bucket for size in sizes), f"no step for up to {bucket} sequences"


def test_shortened_requests_keep_their_prompts() -> None:
    prompts = TINY.prompts(300)
    short = shortened(prompts, 1)
    assert [prompt.token_ids for prompt in short] == [prompt.token_ids for prompt in prompts]
    assert {prompt.num_new for prompt in short} == {1}
