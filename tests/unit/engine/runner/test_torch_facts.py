"""What torch finds here, on a machine without a GPU and, by stand-ins, with one."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.engine_info import EngineInfo
from engine.machine import Gpus
from engine.runner import torch_facts
from engine.runner.torch_facts import find_gpus


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A torch with CUDA, and what it finds."""
    found: dict[str, Any] = {"capabilities": [(9, 0)], "architectures": ["sm_80", "sm_90a", "compute_90"]}
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(found["capabilities"]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found["capabilities"]))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: found["capabilities"][index])
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: found["architectures"])
    return found


@pytest.mark.skipif(torch.version.cuda is not None, reason="says what a torch without CUDA says")
def test_a_torch_without_cuda_says_what_to_install() -> None:
    gpus = find_gpus()
    assert gpus.count == 0
    assert "is built without CUDA (install a build that has it)" in (gpus.obstacle or "")


def test_gpus_are_counted_and_the_least_of_those_wanted_counts(cuda: dict[str, Any]) -> None:
    cuda["capabilities"] = [(9, 0), (8, 6), (3, 5)]
    assert find_gpus() == Gpus(3, (9, 0))
    assert find_gpus(2) == Gpus(3, (8, 6))
    assert find_gpus(3).count == 0


@pytest.mark.parametrize(
    ("compilers", "has_header", "what"),
    [
        ({"gcc"}, True, None),
        ({"clang"}, True, None),
        (set(), True, "no C compiler (Debian: apt-get install gcc)"),
        ({"gcc"}, False, "no Python.h to compile with (Debian: apt-get install python3-dev)"),
    ],
)
def test_what_triton_lacks_to_compile_is_said_before_anything_is_loaded(
    compilers: set[str], has_header: bool, what: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: name if name in compilers else None)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    if has_header:
        (tmp_path / "Python.h").touch()
    obstacle = torch_facts.find_toolchain_obstacle()
    assert (obstacle is None) == (what is None)
    assert (what or "") in (obstacle or "")


def test_a_gpu_that_torch_has_no_code_for_is_none(cuda: dict[str, Any]) -> None:
    cuda["capabilities"] = [(7, 0)]
    gpus = find_gpus()
    assert gpus.count == 0
    assert "has code for compute capability 8.0 and newer, and the GPU has 7.0" in (gpus.obstacle or "")


def test_where_there_is_none_there_is_no_obstacle_either(cuda: dict[str, Any]) -> None:
    cuda["capabilities"] = []
    assert find_gpus() == Gpus()


def test_a_driver_that_is_too_old_is_told_in_one_line(
    cuda: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:

    def warn() -> bool:
        warnings.warn(
            "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040).\n"
            "Please update your GPU driver. (Triggered internally at CUDAFunctions.cpp:119.)",
            stacklevel=2,
        )
        return False

    monkeypatch.setattr(torch.cuda, "is_available", warn)
    assert find_gpus().obstacle == (
        "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040). "
        "Please update your GPU driver"
    )


def test_versions_are_read_from_those_of_builds() -> None:
    assert torch_facts._read_version("2.13.0+cu130") == (2, 13)
    assert torch_facts._read_version("3.6.0") == (3, 6)


def test_what_attention_depends_on_is_found_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_facts, "_find_triton", lambda: None)
    info = EngineInfo(
        device="cpu", kernels="torch", dtype="bf16", kv_dtype="bf16", threads=1, attention="triton"
    )
    config: Any = SimpleNamespace(head_dim=96)
    facts = torch_facts.find_attention_facts(info, config, block_size=256)
    assert (facts.device, facts.dtype, facts.head_dim, facts.block_size) == ("cpu", "bf16", 96, 256)
    assert (facts.triton_version, facts.triton_refusal) == (None, None)
    assert facts.torch_version >= (2, 11)
    assert facts.has_block_tables == (facts.torch_version >= (2, 12))
