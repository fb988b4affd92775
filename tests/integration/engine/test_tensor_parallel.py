"""Two ranks in real processes, under the real engine: the same answers, and what happens if one is lost."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.engine_info import EngineInfo
from engine.errors import ConfigError, EngineInvariantError, RankError
from engine.loading import LoadRequest, load_engine
from engine.model.check import open_model
from engine.model.layer_ops import TorchOps
from engine.model.weights import load_weights
from engine.parallel import launch
from engine.parallel.launch import start_team
from engine.parallel.runner import TensorParallelRunner
from engine.parallel.team import PoolSize, Team
from engine.records import Preempted
from engine.runner.torch_runner import TorchRunner
from engine.sequence import EngineRequest
from tests.support.engine_runs import make_requests, run
from tests.support.models import load_decoder, make_reference, write_folder
from tests.support.ranks import UNEQUAL, is_running, listening_addresses
from tests.support.tokenizers import make_byte_level, write_tokenizer

TIMEOUT_S = 60.0
CONFIG = EngineConfig(
    num_blocks=20, block_size=8, max_num_seqs=8, max_num_batched_tokens=40, max_model_len=96
)
POOL = PoolSize(CONFIG.num_blocks, CONFIG.block_size, CONFIG.max_model_len)
INFO = EngineInfo(
    device="cpu", kernels="torch", dtype="fp32", kv_dtype="fp32", threads=1, attention="reference",
    tensor_parallel_size=2,
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder, make_byte_level())
    return write_folder(make_reference(UNEQUAL), folder)


@pytest.fixture(scope="module")
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the ranks keep what they leave nowhere else."""
    folder = tmp_path_factory.mktemp("tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(folder))
        yield folder


def make_runner(team: Team, model: Path) -> TensorParallelRunner:
    files = open_model(model)
    with torch.inference_mode():
        weights = load_weights(files, torch.float32, torch.device("cpu"), lambda _: None, team.group.shard)
    team.wait_until_loaded(lambda: None)
    return TensorParallelRunner(team, files.config, weights, POOL, frozenset())


@pytest.fixture(scope="module")
def runner(model: Path, temporary_folder: Path) -> Iterator[TensorParallelRunner]:
    team = start_team(open_model(model), INFO, torch.float32)
    runner = make_runner(team, model)
    pids = pids_of(runner)
    assert len(pids) == 1
    yield runner
    pids += pids_of(runner)
    runner.close()
    runner.close()
    assert not any(map(is_running, pids))
    assert list(temporary_folder.iterdir()) == []


def pids_of(runner: TensorParallelRunner) -> list[int]:
    return [rank.pid for rank in runner._team._ranks]


def run_alone(model: Path, requests: list[EngineRequest]) -> dict[str, list[int]]:
    runner = TorchRunner(
        load_decoder(model),
        num_blocks=CONFIG.num_blocks,
        block_size=CONFIG.block_size,
        eos_token_ids=frozenset(),
    )
    return run(EngineCore(CONFIG, runner), requests)[0]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("seed", range(2))
def test_two_ranks_give_the_tokens_of_one_under_pressure_and_from_the_prefix_cache(
    runner: TensorParallelRunner, model: Path, seed: int
) -> None:
    requests = make_requests(seed)
    answers, results = run(EngineCore(CONFIG, runner), requests)
    events = [event for result in results for event in result.record.events]
    assert sum(isinstance(event, Preempted) for event in events) > 0
    assert any(output.num_cached_tokens for result in results for output in result.outputs)
    assert len(requests) == 12
    assert answers == run_alone(model, requests)


def test_a_step_without_work_asks_nobody(runner: TensorParallelRunner) -> None:
    core = EngineCore(CONFIG, runner)
    assert core.step().outputs == []
    assert runner.loss is None


def test_ranks_listen_on_the_loopback_address_only(runner: TensorParallelRunner) -> None:
    addresses = [listening_addresses(pid) for pid in (os.getpid(), *pids_of(runner))]
    assert addresses == [{"0100007F"}] * 2


def test_ranks_leave_signals_that_ask_to_stop_to_rank_0(runner: TensorParallelRunner, model: Path) -> None:
    (pid,) = pids_of(runner)
    assert os.getsid(pid) == pid, "signals of the terminal reach the server's session only"
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, signal_number)
    requests = make_requests(3)[:2]
    assert run(EngineCore(CONFIG, runner), requests)[0] == run_alone(model, requests)


def make_ready(runner: TensorParallelRunner, model: Path) -> None:
    """Reset the runner if it has lost something; it must then give the same answers as ever."""
    if runner.loss is not None:
        before = pids_of(runner)
        runner.recover(lambda: None)
        runner.reset()
        assert not any(map(is_running, before))
    EngineCore(CONFIG, runner).check_runner()
    requests = make_requests(5)[:3]
    assert run(EngineCore(CONFIG, runner), requests)[0] == run_alone(model, requests)


def run_out(core: EngineCore) -> None:
    while core.has_work:
        core.step()


def test_a_rank_that_is_killed_in_a_step_fails_it_and_is_started_again(
    runner: TensorParallelRunner, model: Path
) -> None:
    core = EngineCore(CONFIG, runner)
    core.add_requests(make_requests(4))
    for _ in range(3):
        core.step()
    os.kill(pids_of(runner)[0], signal.SIGKILL)
    with pytest.raises(RankError) as caught:
        run_out(core)
    assert (
        str(caught.value)
        == runner.loss
        == ("Rank 1 of 2 failed: it was ended by SIGKILL (the system does that when memory runs out).")
    )
    with pytest.raises(RankError, match="SIGKILL"):
        core.check_runner()
    core.fail_all("RankError")
    core.reset_runner()
    make_ready(runner, model)


def test_a_step_in_which_another_rank_does_not_take_part_is_ended(
    runner: TensorParallelRunner, model: Path
) -> None:
    make_ready(runner, model)
    with pytest.raises(RankError, match="A step of 2 ranks has not ended within 1 s"), runner._team.step(1.0):
        runner._team.group.add_up(torch.ones(3))  # nobody has told the other one
    assert runner.loss is not None


def test_no_memory_on_rank_0_does_not_have_a_step_computed_twice(
    runner: TensorParallelRunner, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_ready(runner, model)
    steps: list[object] = []
    with monkeypatch.context() as patch:

        def fail(*_: object) -> torch.Tensor:
            steps.append(None)
            raise MemoryError

        patch.setattr(TorchOps, "silu_mul", fail)
        with pytest.raises(RankError, match="Rank 0 failed: MemoryError: no memory"):
            run(EngineCore(CONFIG, runner), make_requests(5)[:1])
    assert len(steps) == 1
    assert runner.loss == "Rank 0 failed: MemoryError: no memory"


def test_what_cannot_be_started_again_is_told_in_one_line_and_can_be_later(
    runner: TensorParallelRunner, model: Path, temporary_folder: Path
) -> None:
    for pid in pids_of(runner):
        os.kill(pid, signal.SIGKILL)
    until(lambda: runner.loss is not None)
    weights, elsewhere = model / "model.safetensors", model.parent / "elsewhere"
    weights.rename(elsewhere)
    with pytest.raises(RankError, match=r"Rank 1 of 2 failed: .*model.*safetensors") as caught:
        runner.recover(lambda: None)
    assert "\n" not in str(caught.value)
    assert pids_of(runner) == []
    assert list(temporary_folder.iterdir()) == []
    elsewhere.rename(weights)

    def give_up() -> None:
        assert pids_of(runner) != []
        raise InterruptedError

    with pytest.raises(InterruptedError):
        runner.recover(give_up)
    assert pids_of(runner) == []
    make_ready(runner, model)


def test_there_is_no_host_tier_to_measure(runner: TensorParallelRunner) -> None:
    with pytest.raises(EngineInvariantError, match="no host tier"):
        runner.measure_block_ns()


def test_ranks_never_load_two_models_and_say_so_in_one_line(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = LoadRequest(
        model_path=model, config=CONFIG, cache_dir=model / "cache", device="cpu", tensor_parallel_size=2
    )
    monkeypatch.setattr(launch, "find_fingerprint", lambda _: "another")
    with pytest.raises(RankError) as caught:
        load_engine(request, lambda _: None)
    assert str(caught.value) == (
        f"Rank 1 of 2 failed: {model}: the model was changed after the server had loaded it."
    )


def test_a_model_with_too_few_heads_is_refused_before_anything_starts(model: Path) -> None:
    request = LoadRequest(
        model_path=model, config=CONFIG, cache_dir=model / "cache", device="cpu", tensor_parallel_size=4
    )
    with pytest.raises(ConfigError, match="tensor_parallel_size is 4, but the model has 3 key/value heads"):
        load_engine(request, lambda _: None)
    with pytest.raises(ConfigError, match="swap_memory"):
        load_engine(replace(request, tensor_parallel_size=2, swap_memory_bytes=2**20), lambda _: None)


def test_giving_up_a_load_leaves_no_process(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = LoadRequest(
        model_path=model, config=CONFIG, cache_dir=model / "cache", device="cpu", tensor_parallel_size=2
    )
    teams: list[Team] = []
    start = Team.start

    def start_and_note(team: Team) -> None:
        start(team)
        teams.append(team)

    monkeypatch.setattr(Team, "start", start_and_note)

    def give_up(progress: object) -> None:
        if teams:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        load_engine(request, give_up)
    (team,) = teams
    until(lambda: not team._ranks)
