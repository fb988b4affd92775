"""The default model with a small pool and a host tier: swapped, offloaded and loaded, the same answers."""

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from app.model_store import models_dir
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.loading import LoadedEngine, LoadRequest, load_engine
from engine.runner.native_runner import NativeRunner
from engine.runner.torch_runner import TorchRunner
from engine.sampling_params import SamplingParams
from engine.sequence import EngineRequest
from tests.support.copying import HeldMemory
from tests.support.engine_runs import count_host_events, run
from tests.support.kernels import open_library

CACHE_DIR = models_dir() / ".converted"
NUM_BLOCKS = 64
TIGHT_BLOCKS = 12
NUM_HOST_BLOCKS = 48
SWAP_BYTES = 24 << 20

BEGINNINGS = (
    "Once upon a time in a village by the sea, " * 8,
    "The history of the computer " * 14,
    "Three of the oldest trees of the world " * 10,
)


def load(path: Path, **options: Any) -> LoadedEngine:
    request = LoadRequest(
        model_path=path,
        config=EngineConfig(num_blocks=NUM_BLOCKS, max_model_len=192, num_host_blocks=NUM_HOST_BLOCKS),
        device="cpu",
        cache_dir=CACHE_DIR,
        **options,
    )
    return load_engine(request, lambda progress: None)


@pytest.fixture(scope="module")
def engine(default_model_path: Path) -> LoadedEngine:
    open_library()
    engine = load(default_model_path)
    assert isinstance(engine.core.runner, NativeRunner)
    return engine


def make_requests(engine: LoadedEngine, count: int, num_tokens: int, name: str = "") -> list[EngineRequest]:
    """Three groups with a long common beginning each; greedy, and natively drawn ones, too.

    Drawn ones show the smallest difference. Plain torch has some: its products depend on the batch.
    """
    greedy = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    drawn = SamplingParams(max_tokens=num_tokens, temperature=0.9, top_p=0.9, seed=7, ignore_eos=True)
    kinds = [greedy, drawn if isinstance(engine.core.runner, NativeRunner) else greedy]
    return [
        EngineRequest(
            request_id=f"{i}{name}",
            prompt_token_ids=engine.tokenizer.encode(f"{BEGINNINGS[i % 3]}Number {i} says"),
            sampling_params=kinds[i % 2],
        )
        for i in range(count)
    ]


def make_core(engine: LoadedEngine, **changes: Any) -> EngineCore:
    return EngineCore(msgspec.structs.replace(engine.core.config, **changes), engine.core.runner)


def answer_alone(engine: LoadedEngine, requests: list[EngineRequest]) -> dict[str, list[int]]:
    alone: dict[str, list[int]] = {}
    for request in requests:
        core = make_core(engine, enable_prefix_caching=False, num_host_blocks=0)
        alone |= run(core, [request])[0]
    return alone


def press(engine: LoadedEngine, count: int, num_tokens: int, **changes: Any) -> Counter[str]:
    """Run requests twice over in a pool that is too small; check the answers, return what happened."""
    first, second = (make_requests(engine, count, num_tokens, name) for name in ("", " again"))
    core = make_core(
        engine,
        num_blocks=TIGHT_BLOCKS,
        max_model_len=TIGHT_BLOCKS * 16,
        preemption_mode="swap",
        preemption_quantum=4,
        **changes,
    )
    answers, results = run(core, first)
    again, more_results = run(core, second)
    alone = answer_alone(engine, first)
    assert all(len(answer) == num_tokens for answer in alone.values())
    assert answers == alone
    assert {name.removesuffix(" again"): answer for name, answer in again.items()} == alone
    return count_host_events([*results, *more_results])


def test_answers_are_the_same_alone_and_swapped_offloaded_and_loaded(engine: LoadedEngine) -> None:
    counts = press(engine, count=6, num_tokens=16)
    assert all(counts[name] > 0 for name in ("swaps", "loads", "host hits", "copies out", "lookahead")), (
        counts
    )


def test_without_a_prefix_cache_a_swapped_request_comes_back_all_the_same(engine: LoadedEngine) -> None:
    counts = press(engine, count=4, num_tokens=16, enable_prefix_caching=False)
    assert counts["swaps"] > 0
    assert counts["loads"] > 0
    assert counts["host hits"] == 0


def test_the_torch_path_swaps_and_loads_as_well(default_model_path: Path) -> None:
    engine = load(default_model_path, kernels="torch", dtype="fp32", num_threads=2)
    assert isinstance(engine.core.runner, TorchRunner)
    counts = press(engine, count=4, num_tokens=8)
    assert all(counts[name] > 0 for name in ("swaps", "loads", "host hits", "copies out")), counts


def test_whoever_leaves_during_a_load_leaves_nothing_behind(
    engine: LoadedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = engine.core.runner
    assert isinstance(runner, NativeRunner)
    memory = HeldMemory(runner.copier.memory)
    monkeypatch.setattr(runner.copier, "memory", memory)
    core = make_core(engine, num_blocks=TIGHT_BLOCKS, max_model_len=TIGHT_BLOCKS * 16)
    kv = core.scheduler.state.kv
    request = make_requests(engine, 1, 8)[0]
    other = EngineRequest(
        request_id="other", prompt_token_ids=[5], sampling_params=SamplingParams(max_tokens=8)
    )
    others = [one for index, one in enumerate(make_requests(engine, 6, 30)) if index % len(BEGINNINGS)]
    for one in (request, *others):
        run(core, [one])  # pushes the first one's prefix out of the pool
    for _ in range(50):
        core.add_request(other)
        core.step()
        memory.hold("back")
        core.add_request(request)
        core.step()
        assert [load.owner for load in kv.loads.values()] == [core.scheduler.num_arrived]
        core.abort(request.request_id)
        core.abort("other")
        memory.release()
        while core.has_work:
            core.step()
        core.check_integrity()
        assert kv.pool.num_used == 0
        assert kv.host.num_pinned == 0
    assert {direction for direction, _, _ in memory.made} == {"out", "back"}


def test_the_costs_are_measured_and_the_memory_gives_the_blocks(default_model_path: Path) -> None:
    open_library()
    config = load(default_model_path, swap_memory_bytes=SWAP_BYTES).core.config
    assert config.num_host_blocks == SWAP_BYTES // (30 * 3 * 64 * 2 * 2 * 16)
    assert config.recompute_ns_per_token > 0
    assert config.swap_ns_per_block > 0
    assert 2 * config.swap_ns_per_block < 16 * config.recompute_ns_per_token
