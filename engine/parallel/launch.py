"""Starts the other ranks of a model that several processes compute together."""

import torch

from engine.engine_info import EngineInfo
from engine.model.check import ModelFiles
from engine.parallel.fingerprint import find_fingerprint
from engine.parallel.team import GLOO, NCCL, Team, TeamSpec


def start_team(files: ModelFiles, info: EngineInfo, dtype: torch.dtype) -> Team:
    """Start `info.tensor_parallel_size` - 1 processes, which load their shares of the model from now on.

    This process is rank 0 and loads its own, `team.group.shard`; see `TensorParallelRunner` for the rest.
    Raises `RankError` if a process cannot be started, `ModelError` if the files are gone.
    """
    is_cuda = info.device == "cuda"
    ranks = range(info.tensor_parallel_size)
    team = Team(
        TeamSpec(
            model_path=files.path,
            fingerprint=find_fingerprint(files),
            devices=[f"cuda:{rank}" if is_cuda else "cpu" for rank in ranks],
            dtype=str(dtype).removeprefix("torch."),
            attention=info.attention,
            num_threads=info.threads,
            backend=NCCL if is_cuda else GLOO,
        )
    )
    team.start()
    return team
