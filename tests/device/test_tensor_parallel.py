"""Ranks on one GPU: two that share it, over gloo, and NCCL with a single rank."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import RankError
from engine.model.check import open_model
from engine.model.shards import Shard
from engine.model.weights import load_weights
from engine.parallel.fingerprint import find_fingerprint
from engine.parallel.group import RankGroup
from engine.parallel.runner import TensorParallelRunner
from engine.parallel.team import GLOO, NCCL, PoolSize, Team, TeamSpec
from engine.runner.torch_runner import TorchRunner
from tests.device.machine import needs_cuda
from tests.support.engine_runs import make_requests, run
from tests.support.models import load_decoder, make_reference, write_folder
from tests.support.ranks import UNEQUAL

pytestmark = needs_cuda

CONFIG = EngineConfig(
    num_blocks=20, block_size=8, max_num_seqs=8, max_num_batched_tokens=40, max_model_len=96
)


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def test_two_ranks_on_one_gpu_give_the_tokens_of_one_and_live_through_a_loss(tmp_path: Path) -> None:
    model = write_folder(make_reference(UNEQUAL), tmp_path / "model")
    files = open_model(model)
    team = Team(
        TeamSpec(
            model_path=model,
            fingerprint=find_fingerprint(files),
            devices=["cuda:0", "cuda:0"],
            dtype="float32",
            attention="reference",
            backend=GLOO,
        )
    )
    team.start()
    with torch.inference_mode():
        weights = load_weights(files, torch.float32, torch.device("cuda:0"), lambda _: None, team.group.shard)
    team.wait_until_loaded(lambda: None)
    pool = PoolSize(CONFIG.num_blocks, CONFIG.block_size, CONFIG.max_model_len)
    runner = TensorParallelRunner(team, files.config, weights, pool, frozenset())
    try:
        alone = TorchRunner(
            load_decoder(model, device="cuda"),
            num_blocks=CONFIG.num_blocks,
            block_size=CONFIG.block_size,
            eos_token_ids=frozenset(),
        )
        requests = make_requests(0)
        expected, _ = run(EngineCore(CONFIG, alone), requests)
        assert run(EngineCore(CONFIG, runner), requests)[0] == expected
        os.kill(team._ranks[0].pid, signal.SIGKILL)
        core = EngineCore(CONFIG, runner)
        with pytest.raises(RankError):
            run(core, requests)
        core.fail_all("RankError")
        core.reset_runner()
        assert run(core, requests)[0] == expected
    finally:
        runner.close()


def test_nccl_sums_joins_and_can_be_aborted(tmp_path: Path) -> None:
    group = RankGroup(Shard(0, 1))
    group.connect(tmp_path / "store", NCCL)
    x = torch.arange(6.0, device="cuda").view(2, 3)
    assert torch.equal(group.add_up(x.clone()), x)
    assert torch.equal(group.join_logits(x, 3), x)
    torch.cuda.synchronize()
    group.abort()
    group.disconnect()
