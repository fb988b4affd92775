"""Compiles the Triton kernels for a Hopper GPU, where there need not be one, by launching them on nothing.

Run it in a process of its own, without Triton's interpreter: `python -m tests.support.compiled_kernels`. It
prints what became of each kernel as JSON.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from engine.kernels.triton import device_limits, gated, norms, paged_decode, paged_prefill, rope_store
from engine.kernels.triton.attention import TritonAttention
from engine.kernels.triton.ops import TritonOps
from engine.model.config import ModelConfig, RopeScaling
from engine.model.layer_ops import HeadNorms, HeadShape
from engine.model.layers import RotaryTable
from tests.support.attention_reference import AttentionShape, make_case

_NUM_PROCESSORS, _SHARED_MEMORY = 132, 232448
_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_KERNELS = {
    "decode": paged_decode._decode_kernel,
    "join": paged_decode._join_kernel,
    "prefill": paged_prefill._prefill_kernel,
    "rotate": rope_store._rotate_store_kernel,
    "norm": norms._norm_kernel,
    "gate": gated._silu_mul_kernel,
}
# (context, tokens computed): contexts that are split and such that are not, with chunks; then all that may
# change while a server runs.
_FIRST_STEPS = [[(1000, 1)], [(5, 1), (30, 1), (40, 17)]]
_LATER_STEPS = [
    [(1, 1)],
    [(16, 1)] * 16 + [(70, 32)] * 16,
    [(400, 1)] * 3 + [(64, 64)],
    [(33, 33)],
    [(4096, 1)],  # 16 splits
]


class _Utils:
    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": _SHARED_MEMORY}

    def load_binary(
        self, name: str, kernel: bytes, shared: int, device: int
    ) -> tuple[Any, Any, int, int, int]:
        return object(), object(), 0, 0, 1024


class _Driver:
    """A driver of an H100 or H200 that compiles what it is given, and starts nothing."""

    utils = _Utils()

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *args: None


def launch_all(head_dim: int, group: int, dtype: torch.dtype, steps: list[list[tuple[int, int]]]) -> None:
    """Launch every kernel as a model of this shape would in each of the steps."""
    shape, hidden_size = AttentionShape(head_dim, group, 2), 1024
    heads = HeadShape(shape.num_heads, shape.num_kv_heads, head_dim, 1e-5)
    rotary = RotaryTable(_make_config(head_dim), 1024, torch.device("cpu"))
    head_norms = HeadNorms(torch.ones(head_dim, dtype=dtype), torch.ones(head_dim, dtype=dtype))
    weight = torch.ones(hidden_size, dtype=dtype)
    ops = TritonOps()
    for sequences in steps:
        case = make_case(shape, sequences, dtype)
        num_rows = len(case.query)
        hidden = torch.zeros((num_rows, hidden_size), dtype=dtype)
        ops.rms_norm(hidden, weight, 1e-5)
        ops.add_rms_norm(hidden, hidden.clone(), weight, 1e-5)
        ops.silu_mul(torch.zeros((num_rows, 2 * hidden_size), dtype=dtype))
        qkv = torch.zeros((num_rows, (shape.num_heads + 4) * head_dim), dtype=dtype)
        query, *new = ops.rotate_and_store(qkv, heads, head_norms, rotary, case.cache, case.batch)
        TritonAttention().attend(query, (new[0], new[1]), case.cache, case.batch)


def _make_config(head_dim: int) -> ModelConfig:
    return ModelConfig(
        "llama", 64, 64, 1, 1, 1, head_dim, 8, 1024, 1e4, RopeScaling(), 1e-5, True, False, False, False,
        frozenset(),
    )  # fmt: skip


def describe(kernel: Any) -> dict[str, int]:
    """Return what a compiled kernel takes of a multiprocessor, and which instructions are in it."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [_CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    ptx = kernel.asm["ptx"]
    return {
        "registers": int(re.findall(r"REG:(\d+)", usage)[0]),
        "stack": int(re.findall(r"STACK:(\d+)", usage)[0]),
        "shared": kernel.metadata.shared,
        "threads": 32 * kernel.metadata.num_warps,
        "async_copies": len(re.findall(r"cp\.async\.cg\.shared\.global \[.*\], 0x10", ptx)),
        "hopper_products": ptx.count("wgmma.mma_async"),
        "wide_loads": len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)),
        "narrow_loads": len(re.findall(r"ld\.global\S*\.b16", ptx)),
    }


def compiled() -> dict[str, list[Any]]:
    """Return all variants of each kernel that were compiled so far."""
    return {name: list(kernel.device_caches[0][0].values()) for name, kernel in _KERNELS.items()}


def main() -> None:
    driver.set_active(_Driver())
    device_limits._INTERPRETED_PROCESSORS = _NUM_PROCESSORS
    report: dict[str, Any] = {}
    for head_dim, group, dtype in (
        (128, 2, torch.bfloat16),
        (64, 4, torch.bfloat16),
        (128, 2, torch.float32),
    ):
        for kernel in _KERNELS.values():
            kernel.device_caches.clear()
        launch_all(head_dim, group, dtype, _FIRST_STEPS)
        first = compiled()
        launch_all(head_dim, group, dtype, _LATER_STEPS)
        report[f"{head_dim} {str(dtype).removeprefix('torch.')}"] = {
            "kernels": {name: [describe(kernel) for kernel in found] for name, found in first.items()},
            "compiled_later": {name: len(found) - len(first[name]) for name, found in compiled().items()},
        }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
