"""Swapped, offloaded and loaded KV under the real engine, with both runners: the same answers, to the bit."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.kernels.cpu.library import NativeModel
from engine.model.check import open_model
from engine.model.decoder import Decoder
from engine.records import Loaded
from engine.runner.native_runner import NativeRunner
from engine.runner.torch_runner import TorchRunner
from engine.sequence import EngineRequest
from tests.support.copying import HeldMemory, LazyCopier
from tests.support.engine_runs import GREEDY, count_host_events, make_requests, run
from tests.support.kernels import load_native, make_sizes
from tests.support.models import VARIANTS, VOCAB_SIZE, load_decoder, make_reference, write_folder

BLOCK_SIZE = 8
NUM_BLOCKS = 16
NUM_HOST_BLOCKS = 40

Runner = NativeRunner | TorchRunner
MakeRunner = Callable[..., Runner]

KINDS = ("native bf16", "native int8", "torch")
FUZZ = [*[(kind, seed) for kind in KINDS[:2] for seed in range(24)], ("torch", 0), ("torch", 1)]


@pytest.fixture(scope="module", params=KINDS)
def make_runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MakeRunner:
    """Return what makes a runner with `num_blocks` (default: few) and `num_host_blocks`."""
    kind, _, kv_dtype = request.param.partition(" ")
    folder = write_folder(make_reference(VARIANTS["llama tied"]), tmp_path_factory.mktemp("model"))
    if kind == "native":
        files = open_model(folder)

        def make_native(num_blocks: int = NUM_BLOCKS, num_host_blocks: int = 0) -> Runner:
            sizes = make_sizes(num_blocks=num_blocks, block_size=BLOCK_SIZE, kv_dtype=kv_dtype)
            model: NativeModel = load_native(files, sizes)
            model.view_kv()[:] = 0xFF  # NaN as bfloat16 and as float32
            return NativeRunner(model, eos_token_ids=frozenset(), num_host_blocks=num_host_blocks)

        return make_native
    torch.set_num_threads(1)
    decoder: Decoder = load_decoder(folder)

    def make_torch(num_blocks: int = NUM_BLOCKS, num_host_blocks: int = 0) -> Runner:
        runner = TorchRunner(
            decoder,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            eos_token_ids=frozenset(),
            num_host_blocks=num_host_blocks,
        )
        runner._cache.storage.fill_(torch.nan)
        return runner

    return make_torch


def make_core(runner: Runner, **changes: Any) -> EngineCore:
    settings: dict[str, Any] = {
        "num_blocks": runner.copier.memory.num_blocks,
        "num_host_blocks": runner.copier.memory.num_host_blocks,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 40,
        "max_model_len": 96,
        "preemption_quantum": 4,
        **changes,
    }
    return EngineCore(EngineConfig(**settings), runner)


def answer_alone(make_runner: MakeRunner, requests: list[EngineRequest]) -> dict[str, list[int]]:
    runner = make_runner(num_blocks=64)
    alone: dict[str, list[int]] = {}
    for request in requests:
        alone |= run(make_core(runner, enable_prefix_caching=False), [request])[0]
    return alone


@pytest.mark.parametrize("is_lazy", [False, True], ids=["beside", "as late as can be"])
@pytest.mark.parametrize("has_cache", [True, False], ids=["prefix cache", "no prefix cache"])
def test_answers_are_the_same_alone_and_swapped_offloaded_and_loaded(
    make_runner: MakeRunner, *, has_cache: bool, is_lazy: bool
) -> None:
    requests = make_requests(3)
    runner = make_runner(num_host_blocks=NUM_HOST_BLOCKS)
    if is_lazy:
        runner.copier = LazyCopier(runner.copier.memory, BLOCK_SIZE)
    core = make_core(runner, preemption_mode="swap", enable_prefix_caching=has_cache)
    answers, results = run(core, requests)
    again = [
        EngineRequest(request_id=f"{r.request_id} again", **{
            name: getattr(r, name) for name in ("prompt_token_ids", "sampling_params")
        })
        for r in requests
    ]  # fmt: skip
    answers_again, results_again = run(core, again)
    counts = count_host_events([*results, *results_again])
    assert counts["swaps"] > 0
    assert counts["loads"] > 0
    assert counts["copies out"] > 0
    if has_cache:
        assert counts["host hits"] > 0
    alone = answer_alone(make_runner, requests)
    assert answers == alone
    assert answers_again == {f"{name} again": answer for name, answer in alone.items()}


@pytest.mark.parametrize(("make_runner", "seed"), FUZZ, indirect=["make_runner"])
def test_answers_are_right_whenever_copies_happen_and_whoever_leaves(
    make_runner: MakeRunner, seed: int
) -> None:
    rng = random.Random(seed)
    requests = make_requests(seed) + [
        EngineRequest(request_id=f"late {r.request_id}", prompt_token_ids=r.prompt_token_ids[:-1],
                      sampling_params=r.sampling_params)
        for r in make_requests(seed)[:8]
    ]  # fmt: skip
    alone = answer_alone(make_runner, requests)
    runner = make_runner(num_host_blocks=rng.choice([3, 9, 30]))
    copier = runner.copier = LazyCopier(runner.copier.memory, BLOCK_SIZE)
    core = make_core(
        runner,
        preemption_mode=rng.choice(["swap", "auto"]),
        offload=rng.random() < 0.7,
        enable_prefix_caching=rng.random() < 0.7,
        preemption_quantum=rng.choice([1, 4]),
    )
    aborted: set[str] = set()
    answers: dict[str, list[int]] = {request.request_id: [] for request in requests}
    waiting = requests.copy()
    while core.has_work or waiting:
        if waiting and (not core.has_work or rng.random() < 0.3):
            core.add_request(waiting.pop(0))
        if rng.random() < 0.03:
            aborted.add(rng.choice(list(answers)))
            for request_id in aborted:
                core.abort(request_id)
        copier.copy_some(rng.choice([0, 0, 1, 5]))
        for output in core.step().outputs if core.has_work else []:
            answers[output.request_id] += [output.token_id] * (output.token_id >= 0)
        core.check_integrity()
    for request_id, answer in answers.items():
        expected = alone[request_id]
        assert answer == (expected[: len(answer)] if request_id in aborted else expected), request_id
    assert core.scheduler.state.kv.pool.num_used == 0
    assert core.scheduler.state.kv.host.num_pinned == 0


@pytest.fixture
def held(make_runner: MakeRunner) -> Iterator[tuple[EngineCore, HeldMemory, EngineRequest]]:
    """An engine, its memory, and a request whose prefix lies in the host tier alone."""
    runner = make_runner(num_host_blocks=NUM_HOST_BLOCKS)
    memory = HeldMemory(runner.copier.memory)
    runner.copier.memory = memory
    core = make_core(runner)
    prompts = [random.Random(i).choices(range(VOCAB_SIZE), k=70) for i in range(3)]
    request, *others = (
        EngineRequest(request_id=str(i), prompt_token_ids=prompt, sampling_params=GREEDY)
        for i, prompt in enumerate(prompts)
    )
    for one in (request, *others):
        run(core, [one])
    assert core.scheduler.state.kv.host.num_used > 70 // BLOCK_SIZE
    memory.made.clear()
    yield core, memory, request
    memory.release()


def test_whoever_leaves_during_a_load_leaves_nothing_behind(
    held: tuple[EngineCore, HeldMemory, EngineRequest],
) -> None:
    core, memory, request = held
    for _ in range(50):
        core.add_request(EngineRequest(request_id="else", prompt_token_ids=[1], sampling_params=GREEDY))
        core.step()
        memory.hold("back")
        core.add_request(request)
        core.step()
        assert core.scheduler.state.kv.loads, "no load is under way"
        core.abort(request.request_id)
        core.check_integrity()
        assert all(load.is_orphan for load in core.scheduler.state.kv.loads.values())
        core.step()
        memory.release()
        core.abort("else")
        while core.has_work:
            core.step()
        core.check_integrity()
        assert core.scheduler.state.kv.pool.num_used == 0
        assert core.scheduler.state.kv.host.num_pinned == 0
    assert any(kind == "back" for kind, _, _ in memory.made)


def test_others_compute_while_a_load_is_under_way(
    held: tuple[EngineCore, HeldMemory, EngineRequest],
) -> None:
    core, memory, request = held
    core.add_request(EngineRequest(request_id="else", prompt_token_ids=[1], sampling_params=GREEDY))
    core.step()
    memory.hold("back")
    core.add_request(request)
    tokens = [core.step().outputs for _ in range(5)]
    assert [[output.request_id for output in outputs] for outputs in tokens] == [["else"]] * 5
    memory.release()
    results = [core.step() for _ in range(20) if core.has_work]
    [loaded] = [event for result in results for event in result.record.events if isinstance(event, Loaded)]
    assert loaded.num_steps > 5
    assert not loaded.waited


def test_a_copy_that_fails_ends_the_step_and_the_engine_starts_over(
    held: tuple[EngineCore, HeldMemory, EngineRequest],
    make_runner: MakeRunner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core, memory, request = held

    def fail(host_id: int, block_id: int) -> None:
        raise MemoryError("injected")

    core.add_request(request)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "copy_in", fail)
        with pytest.raises(RuntimeError, match="host tier failed"):
            core.step()
    ended = core.fail_all("a copy failed").outputs
    assert [(output.request_id, output.finish_reason) for output in ended] == [(request.request_id, "error")]
    assert run(core, [request])[0] == answer_alone(make_runner, [request])
