"""The kernels as compiled for a Hopper GPU, which needs none: the interpreter lets more pass."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[5]
SHARED_MEMORY, REGISTERS = 232448, 65536  # of a multiprocessor
KERNELS = ("decode", "join", "prefill", "rotate", "norm", "gate")
SHAPES = ("128 bfloat16", "64 bfloat16")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Any:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
    }
    command = [sys.executable, "-m", "tests.support.compiled_kernels"]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


@pytest.mark.parametrize("shape", [*SHAPES, "128 float32"])
def test_all_kernels_compile_and_no_step_needs_another_variant(report: Any, shape: str) -> None:
    kernels = report[shape]["kernels"]
    assert {name: len(kernels[name]) for name in KERNELS} == {
        "decode": 2,  # contexts split or whole
        "join": 1,
        "prefill": 1,
        "rotate": 1,
        "norm": 2,  # with a sum before it or without
        "gate": 1,
    }
    assert report[shape]["compiled_later"] == dict.fromkeys(KERNELS, 0)


@pytest.mark.parametrize("shape", SHAPES)
def test_no_kernel_spills_registers(report: Any, shape: str) -> None:
    for name in KERNELS:
        assert [kernel["stack"] for kernel in report[shape]["kernels"][name]] == [
            0 for _ in report[shape]["kernels"][name]
        ], name


@pytest.mark.parametrize("shape", SHAPES)
def test_memory_is_read_in_pieces_of_16_bytes(report: Any, shape: str) -> None:
    for name in KERNELS:
        for kernel in report[shape]["kernels"][name]:
            assert kernel["narrow_loads"] == 0, name
            assert kernel["wide_loads"] > 0, name
    for name in ("decode", "prefill"):
        assert all(kernel["async_copies"] >= 32 for kernel in report[shape]["kernels"][name]), name


@pytest.mark.parametrize(("shape", "num_programs"), [("128 bfloat16", 1), ("64 bfloat16", 2)])
def test_prefill_uses_the_tensor_cores_of_the_gpu(report: Any, shape: str, num_programs: int) -> None:
    (kernel,) = report[shape]["kernels"]["prefill"]
    assert kernel["hopper_products"] > 0
    assert num_programs * kernel["shared"] <= SHARED_MEMORY
    assert num_programs * kernel["registers"] * kernel["threads"] <= REGISTERS


@pytest.mark.parametrize("shape", SHAPES)
def test_three_programs_for_single_tokens_run_on_a_multiprocessor(report: Any, shape: str) -> None:
    for kernel in report[shape]["kernels"]["decode"]:
        assert 3 * kernel["shared"] <= SHARED_MEMORY
        assert 3 * kernel["registers"] * kernel["threads"] <= REGISTERS
