"""How a model is run, in words."""

from typing import Any

import msgspec
import pytest

from engine.engine_info import EngineInfo

CPU: dict[str, Any] = {"device": "cpu", "kernels": "torch", "dtype": "fp32", "kv_dtype": "fp32", "threads": 2}
CUDA: dict[str, Any] = {
    "device": "cuda",
    "kernels": "torch",
    "dtype": "bf16",
    "kv_dtype": "bf16",
    "threads": 0,
}


@pytest.mark.parametrize(
    ("facts", "means", "place", "line"),
    [
        (
            CPU | {"kernels": "avx2", "dtype": "q4", "kv_dtype": "bf16", "attention": "native", "threads": 1},
            "avx2",
            "1 thread",
            "q4 weights, bf16 KV cache, native avx2 kernels, 1 thread",
        ),
        (
            CPU | {"attention": "reference"},
            "torch · reference attention",
            "2 threads",
            "fp32 weights, fp32 KV cache, plain torch, 2 threads",
        ),
        (
            CUDA | {"attention": "triton"},
            "torch · triton attention",
            "cuda",
            "bf16 weights, bf16 KV cache, torch with triton attention, cuda",
        ),
        (
            CUDA | {"attention": "reference", "tensor_parallel_size": 4},
            "torch · reference attention",
            "4 cuda devices",
            "bf16 weights, bf16 KV cache, torch with reference attention, 4 cuda devices",
        ),
        (
            CPU | {"attention": "reference", "tensor_parallel_size": 2, "threads": 1},
            "torch · reference attention",
            "2 processes of 1 thread",
            "fp32 weights, fp32 KV cache, plain torch, 2 processes of 1 thread",
        ),
        (CPU, "torch", "2 threads", "fp32 weights, fp32 KV cache, plain torch, 2 threads"),
    ],
)
def test_it_says_what_computes_and_where(facts: dict[str, Any], means: str, place: str, line: str) -> None:
    info = EngineInfo(**facts)
    assert (info.means, info.place, str(info)) == (means, place, line)


def test_what_older_versions_have_recorded_can_be_read() -> None:
    info = msgspec.json.decode(msgspec.json.encode(CUDA), type=EngineInfo)
    assert (info.attention, info.tensor_parallel_size) == ("", 1)
    assert str(info) == "bf16 weights, bf16 KV cache, plain torch, cuda"
