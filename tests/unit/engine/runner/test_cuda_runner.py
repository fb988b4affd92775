"""The CUDA runner's logic on a device that does everything late: answers, run-ahead, graphs, memory."""

import random
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.model import sampler
from engine.model.decoder import Arithmetic, Decoder
from engine.model.sampler import UNDECIDED_TOKEN_ID, DrawTensors, choose
from engine.records import Preempted, StepRecord, StepResult
from engine.runner import launcher
from engine.runner.copier import ArrayBlocks
from engine.runner.cuda_runner import CudaRunner
from engine.runner.launcher import LaunchSizes, PendingTokens
from engine.runner.shares import Share
from engine.runner.torch_runner import TorchRunner
from engine.runner.warm_up import make_text
from engine.sampling_params import SamplingParams
from engine.scheduling.output import ScheduledSequence, SchedulerOutput
from engine.sequence import EngineRequest, FinishReason
from tests.support.copying import HeldMemory
from tests.support.engine_runs import NUM_TOKENS, count_host_events, make_requests, run
from tests.support.fake_device import FakeDevice
from tests.support.models import VARIANTS, VOCAB_SIZE, load_decoder, make_reference, write_folder
from tests.support.padded_attention import PaddedAttention

BLOCK_SIZE = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_folder(make_reference(VARIANTS["llama tied"]), tmp_path_factory.mktemp("model"))


def make_config(num_blocks: int, num_host_blocks: int = 0, **changes: Any) -> EngineConfig:
    config = EngineConfig(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=8,
        max_num_batched_tokens=40,
        max_model_len=96,
        num_host_blocks=num_host_blocks,
    )
    return msgspec.structs.replace(config, **changes)


def make_runner(
    decoder: Decoder,
    config: EngineConfig,
    *,
    computes_ahead: bool = True,
    eos_token_ids: frozenset[int] = frozenset(),
    is_quick: bool = False,
) -> tuple[CudaRunner, FakeDevice]:
    device = FakeDevice(is_quick=is_quick)
    cache = decoder.make_cache(config.num_blocks, config.block_size)
    cache.storage.fill_(torch.nan)
    pool = cache.storage.movedim(2, 0).view(torch.uint8).numpy()
    sizes = LaunchSizes(
        config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len, config.block_size
    )
    runner = CudaRunner(
        decoder,
        cache,
        device,
        sizes,
        ArrayBlocks(pool, config.num_host_blocks),
        eos_token_ids=eos_token_ids,
        computes_ahead=computes_ahead,
    )
    return runner, device


def make_plain(
    folder: Path, config: EngineConfig, eos_token_ids: frozenset[int] = frozenset()
) -> TorchRunner:
    return TorchRunner(
        load_decoder(folder),
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        eos_token_ids=eos_token_ids,
        num_host_blocks=config.num_host_blocks,
    )


def expected_answers(
    folder: Path, requests: list[EngineRequest], eos_token_ids: frozenset[int] = frozenset()
) -> dict[str, list[int]]:
    config = make_config(256)
    return run(EngineCore(config, make_plain(folder, config, eos_token_ids)), requests)[0]


def load_captured(folder: Path) -> Decoder:
    plain = load_decoder(folder)
    return Decoder(plain.config, plain._weights, 96, Arithmetic(PaddedAttention()))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("attention", ["captured", "reference"])
@pytest.mark.parametrize(("computes_ahead", "is_quick"), [(True, False), (True, True), (False, False)])
def test_answers_are_those_of_the_torch_runner(
    folder: Path, seed: int, attention: str, computes_ahead: bool, is_quick: bool
) -> None:
    decoder = load_captured(folder) if attention == "captured" else load_decoder(folder)
    config = make_config(num_blocks=20)
    runner, device = make_runner(decoder, config, computes_ahead=computes_ahead, is_quick=is_quick)
    answers, results = run(EngineCore(config, runner), make_requests(seed))
    assert answers == expected_answers(folder, make_requests(seed))
    assert any(isinstance(event, Preempted) for result in results for event in result.record.events)
    assert any(output.num_cached_tokens for result in results for output in result.outputs)
    assert (runner.num_taken > 100) == computes_ahead
    assert (runner.num_dropped > 0) == computes_ahead
    assert bool(device.graphs) == (attention == "captured")
    assert all(graph.num_replays > 0 for graph in device.graphs)


@pytest.mark.parametrize("seed", [0, 1, 3])
@pytest.mark.parametrize("is_quick", [False, True])
def test_answers_are_the_same_with_a_host_tier(folder: Path, seed: int, is_quick: bool) -> None:
    # Some answers end early, so that blocks which are loaded into had just been computed ahead in.
    eos_token_ids = frozenset(range(0, VOCAB_SIZE, 24)) if seed % 2 else frozenset()
    config = make_config(num_blocks=20, num_host_blocks=40)
    runner, _ = make_runner(load_captured(folder), config, eos_token_ids=eos_token_ids, is_quick=is_quick)
    answers, results = run(EngineCore(config, runner), make_requests(seed))
    assert answers == expected_answers(folder, make_requests(seed), eos_token_ids)
    counts = count_host_events(results)
    assert counts["loads"] > 0
    assert counts["copies out"] > 0
    assert runner.num_taken > 20
    assert all(len(answer) == NUM_TOKENS for answer in answers.values()) == (not eos_token_ids)


def test_loads_begin_when_nothing_is_computed_ahead(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(num_blocks=20, num_host_blocks=40)
    runner, device = make_runner(load_captured(folder), config)
    real, was_idle = runner.copier.begin, []

    def begin(output: SchedulerOutput) -> None:
        if output.loads:
            was_idle.append(device.is_idle)
        real(output)

    monkeypatch.setattr(runner.copier, "begin", begin)
    run(EngineCore(config, runner), make_requests(0))
    assert was_idle
    assert all(was_idle)


def test_nothing_is_computed_ahead_while_a_copy_may_still_read(folder: Path) -> None:
    config = make_config(num_blocks=20, num_host_blocks=40)
    runner, _ = make_runner(load_captured(folder), config)
    held = HeldMemory(runner.copier.memory)
    runner.copier.memory = held
    sequence = make_text([1, 2, 3], [0])
    sequence.max_tokens, sequence.slot = 20, 0
    held.hold("out")
    runner.execute(SchedulerOutput([ScheduledSequence(sequence, 0, 3)], swap_outs=[(5, 1)]))
    assert runner._ahead is None
    held.release()
    runner.copier._wait_for(1)
    sequence.token_ids.append(4)
    runner.execute(SchedulerOutput([ScheduledSequence(sequence, 3, 1)]))
    assert runner._ahead is not None


# ---- the scheduler does not know ------------------------------------------------------------------


def live(core: EngineCore, seed: int) -> list[StepResult]:
    """Lead an engine through a random life: requests come, are aborted and stopped at any step."""
    rng, results, num_requests = random.Random(seed), [], 0
    while num_requests < 40 or core.has_work:
        if num_requests < 40 and rng.random() < 0.3:
            params = SamplingParams(
                max_tokens=rng.randint(1, 30),
                temperature=rng.choice([0.0, 0.0, 1.0]),
                top_p=rng.choice([1.0, 0.9]),
                seed=num_requests,
            )
            prompt = rng.choices(range(VOCAB_SIZE), k=rng.choice([1, 3, 8, 16, 17, 50]))
            core.add_request(
                EngineRequest(
                    request_id=str(num_requests),
                    prompt_token_ids=[7] * rng.choice([0, 16]) + prompt,
                    sampling_params=params,
                )
            )
            num_requests += 1
        if rng.random() < 0.05:
            core.abort(str(rng.randrange(40)))
        if rng.random() < 0.05:
            core.stop(str(rng.randrange(40)), 0)
        result = core.step() if core.has_work else core.flush()
        if result is not None:
            results.append(result)
        core.check_integrity()
    return results


def without_times(record: StepRecord) -> StepRecord:
    return msgspec.structs.replace(record, t_ns=0, schedule_ns=0, forward_ns=0, sample_ns=0, host_ns=0)


@pytest.mark.parametrize("seed", range(6))
def test_records_are_those_of_a_runner_that_never_computes_ahead(folder: Path, seed: int) -> None:
    # Aborted sequences, answers that end early and too few blocks: much is computed for nothing.
    eos_token_ids = frozenset(range(0, VOCAB_SIZE, 16))
    config = make_config(num_blocks=18, enable_prefix_caching=seed % 3 > 0)
    runner, _ = make_runner(load_captured(folder), config, eos_token_ids=eos_token_ids)
    plain = make_plain(folder, config, eos_token_ids)
    results, expected = (
        live(EngineCore(config, r, clock_ns=count().__next__, wall_ns=count().__next__), seed)
        for r in (runner, plain)
    )
    for got, want in zip(results, expected, strict=True):
        assert without_times(got.record) == without_times(want.record)
        assert got.outputs == want.outputs
    assert any(isinstance(event, Preempted) for result in results for event in result.record.events)
    assert runner.num_taken > 100
    assert runner.num_dropped > 5


# ---- tokens that candidates do not decide -----------------------------------------------------------


def test_a_token_that_the_candidates_do_not_decide_is_found_and_what_followed_it_is_dropped(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, top_p=0.5, seed=3)
    requests = [
        EngineRequest(request_id=str(i), prompt_token_ids=[i, 5, 9], sampling_params=flat) for i in range(4)
    ]
    undecided, num_rows = 0, 0

    def choose_and_count(logits: torch.Tensor, draws: DrawTensors | None) -> torch.Tensor:
        nonlocal undecided, num_rows
        token_ids = choose(logits, draws)
        num_rows += len(token_ids)
        undecided += int((token_ids == UNDECIDED_TOKEN_ID).sum())
        return token_ids

    monkeypatch.setattr(launcher, "choose", choose_and_count)
    monkeypatch.setattr(sampler, "_NUM_CANDIDATES", 80)
    config = make_config(num_blocks=64)
    runner, _ = make_runner(load_captured(folder), config)
    answers, _ = run(EngineCore(config, runner), requests)
    assert 0.2 < undecided / num_rows < 0.8, "both kinds follow each other"
    assert answers == expected_answers(folder, requests)
    assert num_rows < 1.5 * len(requests) * NUM_TOKENS, "rows that are not decided are not computed again"


# ---- too little memory ------------------------------------------------------------------------------


def limit_rows(
    runner: CudaRunner, monkeypatch: pytest.MonkeyPatch, is_too_much: Callable[[list[Share]], bool]
) -> list[int]:
    """Let launches fail as the device does when it has no memory left; return the sizes of those."""
    failed: list[int] = []
    real = runner._launcher.launch

    def launch(shares: list[Share]) -> PendingTokens:
        if is_too_much(shares):
            failed.append(len(shares))
            raise torch.OutOfMemoryError("no memory")
        return real(shares)

    monkeypatch.setattr(runner._launcher, "launch", launch)
    return failed


def test_a_step_that_needs_too_much_memory_is_computed_in_parts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(num_blocks=20)
    runner, device = make_runner(load_captured(folder), config)
    failed = limit_rows(runner, monkeypatch, lambda shares: sum(share.count for share in shares) > 5)
    answers, _ = run(EngineCore(config, runner), make_requests(1))
    assert answers == expected_answers(folder, make_requests(1))
    assert 1 in failed  # chunks of a single prompt were halved, too
    assert max(failed) > 1
    assert device.num_frees > 0


def test_a_sequence_that_no_memory_is_enough_for_fails_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(num_blocks=64)
    runner, _ = make_runner(load_captured(folder), config)
    limit_rows(runner, monkeypatch, lambda shares: any(s.sequence.request_id == "3" for s in shares))
    core = EngineCore(config, runner)
    requests = make_requests(2)
    core.add_requests(requests)
    answers: dict[str, list[int]] = {request.request_id: [] for request in requests}
    ends: dict[str, str] = {}
    while core.has_work:
        for output in core.step().outputs:
            if output.token_id >= 0:
                answers[output.request_id].append(output.token_id)
            if output.finish_reason is not None:
                ends[output.request_id] = output.finish_reason
        core.check_integrity()
    expected = expected_answers(folder, requests)
    assert ends.pop("3") == FinishReason.ERROR
    assert answers.pop("3") == []
    del expected["3"]
    assert answers == expected
    assert set(ends.values()) == {FinishReason.LENGTH}


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("no memory"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
    ids=["torch", "driver", "triton"],
)
def test_without_memory_for_graphs_steps_go_without_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    config = make_config(num_blocks=64)
    runner, device = make_runner(load_captured(folder), config)

    def capture(work: Callable[[], torch.Tensor]) -> None:
        raise error

    monkeypatch.setattr(device, "capture", capture)
    answers, _ = run(EngineCore(config, runner), make_requests(0))
    assert answers == expected_answers(folder, make_requests(0))
    assert caplog.text.count("No memory for a CUDA graph") == 1


# ---- starting over ----------------------------------------------------------------------------------


def test_after_a_reset_nothing_that_was_computed_ahead_shows(folder: Path) -> None:
    config = make_config(num_blocks=64)
    runner, _ = make_runner(load_captured(folder), config)
    core = EngineCore(config, runner)
    core.add_requests(make_requests(9)[:4])
    for _ in range(4):
        core.step()
    core.fail_all("injected")
    core.reset_runner()
    runner._launcher._cache.storage.fill_(torch.nan)
    requests = make_requests(8)
    answers, _ = run(core, requests)
    assert answers == expected_answers(folder, requests)


def test_warming_up_works_for_any_block_size_and_length(folder: Path) -> None:
    for block_size, max_model_len in ((1, 96), (2, 96), (16, 96), (96, 96), (16, 4)):
        config = make_config(num_blocks=96, block_size=block_size, max_model_len=max_model_len)
        plain = load_decoder(folder)
        decoder = Decoder(plain.config, plain._weights, max_model_len, Arithmetic(PaddedAttention()))
        make_runner(decoder, config)[0].warm_up()


@pytest.mark.parametrize("seed", range(2))
def test_more_changes_of_block_tables_than_go_with_a_step_are_all_made(
    folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "_MAX_CHANGES", 3)
    config = make_config(num_blocks=20)
    runner, _ = make_runner(load_captured(folder), config)
    assert run(EngineCore(config, runner), make_requests(seed))[0] == (
        expected_answers(folder, make_requests(seed))
    )
