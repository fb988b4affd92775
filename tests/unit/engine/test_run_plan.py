"""How a model is run: what is chosen where nothing is asked for, and what does not go together."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from engine import run_plan
from engine.errors import ConfigError
from engine.machine import usable_cores
from engine.run_plan import RunOptions, choose_plan

HAS = ("avx512vnni", "avx2")


def make_files(four_bit_share: float = 1.0, head_dim: int = 64) -> Any:
    count = int(1000 * four_bit_share)
    weights = {
        "a": SimpleNamespace(dtype="Q4_1", num_elements=count),
        "b": SimpleNamespace(dtype="Q8_0", num_elements=1000 - count),
    }
    if not count:
        del weights["a"]
    return SimpleNamespace(
        weights=weights,
        config=SimpleNamespace(head_dim=head_dim),
        info=SimpleNamespace(num_parameters=1000, storage="Q8_0"),
        path=SimpleNamespace(name="model.gguf"),
    )


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_plan, "runnable", lambda: HAS)


def choose(options: RunOptions, files: Any = None, *, has_cuda: bool = False) -> tuple[str, ...]:
    info = choose_plan(options, files or make_files(), has_cuda=lambda: has_cuda).info
    return info.device, info.kernels, info.dtype, info.kv_dtype


@pytest.mark.parametrize(
    ("asked", "four_bit_share", "chosen"),
    [
        ({}, 0.6, ("cpu", "avx512vnni", "q4", "bf16")),
        ({}, 0.4, ("cpu", "avx512vnni", "int8", "bf16")),
        ({}, 0.0, ("cpu", "avx512vnni", "int8", "bf16")),
        ({"dtype": "q4"}, 0.1, ("cpu", "avx512vnni", "q4", "bf16")),
        ({"dtype": "bf16", "kv_dtype": "int8"}, 0.0, ("cpu", "avx512vnni", "bf16", "int8")),
        ({"dtype": "fp32"}, 0.0, ("cpu", "torch", "fp32", "fp32")),
        ({"dtype": "fp32", "kernels": "avx2"}, 0.0, ("cpu", "avx2", "fp32", "bf16")),
        ({"dtype": "fp32", "kv_dtype": "bf16"}, 0.0, ("cpu", "avx512vnni", "fp32", "bf16")),
        ({"kernels": "avx2"}, 1.0, ("cpu", "avx2", "q4", "bf16")),
        ({"kernels": "torch"}, 1.0, ("cpu", "torch", "fp32", "fp32")),
        ({"kernels": "torch", "dtype": "bf16"}, 1.0, ("cpu", "torch", "bf16", "bf16")),
    ],
)
def test_what_is_chosen_on_the_cpu(
    asked: dict[str, str], four_bit_share: float, chosen: tuple[str, ...]
) -> None:
    assert choose(RunOptions(**asked), make_files(four_bit_share)) == chosen  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        ({}, ("cuda", "torch", "bf16", "bf16")),
        ({"device": "cuda", "dtype": "fp32"}, ("cuda", "torch", "fp32", "fp32")),
        ({"device": "cpu"}, ("cpu", "avx512vnni", "q4", "bf16")),
        ({"dtype": "int8"}, ("cpu", "avx512vnni", "int8", "bf16")),
        ({"kernels": "avx2"}, ("cpu", "avx2", "q4", "bf16")),
        ({"kernels": "torch"}, ("cuda", "torch", "bf16", "bf16")),
    ],
)
def test_a_gpu_is_used_unless_something_needs_the_cpu(asked: dict[str, str], chosen: tuple[str, ...]) -> None:
    assert choose(RunOptions(**asked), has_cuda=True) == chosen  # type: ignore[arg-type]


@pytest.mark.parametrize("asked", [{"device": "cpu"}, {"dtype": "q4"}, {"kernels": "avx2"}])
def test_nobody_looks_for_a_gpu_where_it_does_not_matter(asked: dict[str, str]) -> None:

    def fail() -> bool:
        raise AssertionError("looked for a GPU")

    choose_plan(RunOptions(**asked), make_files(), has_cuda=fail)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"kernels": "avx512"}, r"kernels avx512 cannot be had.*can run avx512vnni, avx2, torch"),
        ({"kernels": "sse"}, "kernels is 'sse'; allowed: auto, avx512, .*torch"),
        ({"dtype": "fp16"}, "dtype is 'fp16'; allowed: auto, q4, int8, bf16, fp32"),
        ({"kv_dtype": "fp32"}, "kv_dtype is 'fp32'; allowed: auto, bf16, int8"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"num_threads": 0}, "num_threads is 0; allowed: 1 or more"),
        ({"dtype": "q4", "kernels": "torch"}, "dtype q4 needs the native kernels.*use fp32 or bf16"),
        ({"kv_dtype": "int8", "kernels": "torch"}, "kv_dtype is int8.*as the weights"),
        ({"kv_dtype": "bf16", "kernels": "torch"}, "kv_dtype is bf16.*in fp32"),
        ({"device": "cuda", "dtype": "q4"}, "dtype q4 needs the native kernels, which run on the CPU"),
        ({"device": "cuda", "kernels": "avx2"}, "kernels avx2 needs the native kernels"),
        ({"device": "cuda"}, "torch sees no CUDA device"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        choose(RunOptions(**asked))
    assert "\n" not in str(caught.value)


def test_four_bits_that_are_not_there_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"model\.gguf has no weights of four bits.*Q8_0.*use auto, int8 or bf16"
    ):
        choose(RunOptions(dtype="q4"), make_files(0.0))


@pytest.mark.parametrize("reason", ["cpu", "head size"])
def test_where_there_are_no_kernels_torch_serves_and_a_sentence_says_why(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    files = make_files(head_dim=24 if reason == "head size" else 64)
    if reason == "cpu":
        monkeypatch.setattr(run_plan, "runnable", lambda: ())
    plan = choose_plan(RunOptions(), files, has_cuda=lambda: False)
    assert (plan.is_native, plan.info.dtype) == (False, "fp32")
    assert "plain torch path serves" in (plan.note or "")
    assert ("AVX2" if reason == "cpu" else "have 24") in (plan.note or "")
    for options in (RunOptions(dtype="int8"), RunOptions(kv_dtype="int8"), RunOptions(kernels="avx2")):
        with pytest.raises(ConfigError, match="cannot be had"):
            choose_plan(options, files, has_cuda=lambda: False)


def test_threads_are_those_asked_for_or_the_cores_that_may_be_used() -> None:
    files = make_files()
    for kernels in ("auto", "torch"):
        options = RunOptions(kernels=kernels)
        assert choose_plan(options, files, has_cuda=lambda: False).info.threads == usable_cores()
        options = replace(options, num_threads=3)
        info = choose_plan(options, files, has_cuda=lambda: False).info
        assert info.threads == 3
        assert str(info).endswith("3 threads")
    assert choose_plan(RunOptions(), files, has_cuda=lambda: True).info.place == "cuda"
