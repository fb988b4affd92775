"""What torch finds here: GPUs that it can use, and ways to compute attention. Asking takes seconds."""

import importlib.util
import inspect
import os
import shutil
import sysconfig
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from engine.engine_info import EngineInfo
from engine.machine import Gpus, is_triton_interpreted
from engine.model.config import ModelConfig
from engine.model.varlen_attention import load_varlen_attn
from engine.runner.attention_choice import AttentionFacts

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Number formats by the names that options give them."""


def find_gpus(num_wanted: int = 1) -> Gpus:
    """Return how many GPUs torch can use, or why it cannot; the first `num_wanted` are those that count."""
    if torch.version.cuda is None:
        return Gpus(obstacle=f"torch {torch.__version__} is built without CUDA (install a build that has it)")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")  # torch says so, for one, if the driver is too old
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        capabilities = [torch.cuda.get_device_capability(index) for index in range(min(count, num_wanted))]
    if not capabilities:
        return Gpus(obstacle=as_clause(str(caught[0].message)) if caught else None)
    capability, oldest = min(capabilities), _oldest_capability(torch.cuda.get_arch_list())
    if capability < oldest:
        return Gpus(
            obstacle=f"torch {torch.__version__} has code for compute capability {oldest[0]}.{oldest[1]} and "
            f"newer, and the GPU has {capability[0]}.{capability[1]} (install an older torch)"
        )
    return Gpus(count, capability)


def _oldest_capability(architectures: list[str]) -> tuple[int, int]:
    """Return the least compute capability of a list such as ["sm_80", "sm_90a", "compute_90"]."""
    numbers = [int(name.removeprefix("sm_").rstrip("af")) for name in architectures if name.startswith("sm_")]
    return divmod(min(numbers), 10) if numbers else (0, 0)


def as_clause(message: str) -> str:
    """Return a message of torch's as a part of a sentence: in one line, without the place in its source."""
    line = " ".join(message.split()).partition("(Triggered internally")[0]
    return line.strip().removesuffix(".")


def find_attention_facts(info: EngineInfo, config: ModelConfig, block_size: int) -> AttentionFacts:
    """Return what the choice of an attention for a model depends on."""
    triton_version = _find_triton()
    refusal = None
    if triton_version is not None:
        refusal = _find_triton_refusal(info, config)
    return AttentionFacts(
        device=info.device,
        capability=torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0),
        dtype=info.dtype,
        head_dim=config.head_dim,
        block_size=block_size,
        triton_version=triton_version,
        triton_refusal=refusal,
        is_interpreted=is_triton_interpreted(),
        torch_version=_read_version(torch.__version__),
        has_block_tables=_has_block_tables(),
    )


def _read_version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def _find_triton() -> tuple[int, int] | None:
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        return _read_version(version("triton"))
    except PackageNotFoundError:  # a folder of that name, but no package
        return None


def _find_triton_refusal(info: EngineInfo, config: ModelConfig) -> str | None:
    """Return why the Triton kernels cannot be had or do not take a model, as a part of a sentence."""
    if info.device == "cuda":
        obstacle = find_toolchain_obstacle()
        if obstacle is not None:
            return obstacle
    from engine.kernels.triton.attention import supports  # noqa: PLC0415 - imports Triton

    group = config.num_heads // config.num_kv_heads
    return supports(config.head_dim, DTYPES[info.dtype], group, torch.device(info.device))


def find_toolchain_obstacle() -> str | None:
    """Return what Triton lacks to compile the few lines of C by which it launches kernels."""
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not os.environ.get("CC") and shutil.which("gcc") is None and shutil.which("clang") is None:
        return "Triton finds no C compiler (Debian: apt-get install gcc)"
    if not header.is_file():
        return f"Triton finds no {header.name} to compile with (Debian: apt-get install python3-dev)"
    return None


def _has_block_tables() -> bool:
    try:
        return "block_table" in inspect.signature(load_varlen_attn()).parameters
    except ImportError:
        return False
