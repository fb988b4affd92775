"""How a model is run: what is chosen where nothing is asked for, and what does not go together."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from engine import run_plan
from engine.errors import ConfigError
from engine.machine import Gpus, usable_cores
from engine.run_plan import RunOptions, choose_plan, refuse_host_tier

HAS = ("avx512vnni", "avx2")
AMPERE = Gpus(1, (8, 0))
TURING = Gpus(1, (7, 5))
NONE = Gpus()


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
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def choose(options: RunOptions, files: Any = None, *, gpus: Gpus = NONE) -> tuple[str, ...]:
    info = choose_plan(options, files or make_files(), find_gpus=lambda: gpus).info
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
        ({"dtype": "fp16"}, ("cuda", "torch", "fp16", "fp16")),
        ({"attention": "varlen"}, ("cuda", "torch", "bf16", "bf16")),
        ({"device": "cpu", "attention": "reference"}, ("cpu", "torch", "fp32", "fp32")),
        ({"device": "cpu", "tensor_parallel_size": 2}, ("cpu", "torch", "fp32", "fp32")),
    ],
)
def test_a_gpu_is_used_unless_something_needs_the_cpu(asked: dict[str, str], chosen: tuple[str, ...]) -> None:
    assert choose(RunOptions(**asked), gpus=AMPERE) == chosen  # type: ignore[arg-type]


@pytest.mark.parametrize("asked", [{"device": "cpu"}, {"dtype": "q4"}, {"kernels": "avx2"}])
def test_nobody_looks_for_a_gpu_where_it_does_not_matter(asked: dict[str, str]) -> None:

    def fail() -> Gpus:
        raise AssertionError("looked for a GPU")

    choose_plan(RunOptions(**asked), make_files(), find_gpus=fail)  # type: ignore[arg-type]


def test_a_gpu_without_bf16_computes_in_fp16_and_says_so() -> None:
    plan = choose_plan(RunOptions(), make_files(), find_gpus=lambda: TURING)
    assert (plan.info.dtype, plan.info.kv_dtype) == ("fp16", "fp16")
    assert plan.note == "The GPU cannot compute in bf16: weights and KV cache are fp16."
    plan = choose_plan(RunOptions(dtype="fp16"), make_files(), find_gpus=lambda: TURING)
    assert plan.note is None
    with pytest.raises(ConfigError, match=r"dtype is bf16, which the GPU .*7\.5.* use fp16 or fp32"):
        choose(RunOptions(dtype="bf16"), gpus=TURING)


def test_a_gpu_that_torch_cannot_use_is_passed_over_with_a_word_or_refused_where_it_was_asked_for() -> None:
    gpus = Gpus(obstacle="The NVIDIA driver on your system is too old")
    plan = choose_plan(RunOptions(), make_files(), find_gpus=lambda: gpus)
    assert plan.info.device == "cpu"
    assert plan.note == (
        "There seems to be a GPU, but torch cannot use it: The NVIDIA driver on your system is too old. "
        "The CPU serves."
    )
    files = make_files(head_dim=24)
    plan = choose_plan(RunOptions(), files, find_gpus=lambda: gpus)
    assert "too old. The CPU serves. The plain torch path serves" in (plan.note or "")
    with pytest.raises(ConfigError, match=r"device is cuda, but .* driver .* is too old; use cpu or auto"):
        choose(RunOptions(device="cuda"), gpus=gpus)


@pytest.mark.parametrize(
    ("asked", "gpus", "attention"),
    [
        ({}, Gpus(), "native"),
        ({"kernels": "torch"}, Gpus(), "reference"),
        ({"attention": "reference"}, Gpus(), "reference"),
        ({}, AMPERE, "auto"),  # until torch is there
        ({"attention": "varlen"}, AMPERE, "varlen"),
        ({"tensor_parallel_size": 2}, Gpus(2, (8, 0)), "auto"),
    ],
)
def test_which_attention_is_planned(asked: dict[str, Any], gpus: Gpus, attention: str) -> None:
    plan = choose_plan(RunOptions(**asked), make_files(), find_gpus=lambda: gpus)
    assert plan.info.attention == attention


def test_triton_on_the_cpu_is_for_its_interpreter_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"attention is triton, which needs a GPU.*use auto or reference"):
        choose(RunOptions(device="cpu", attention="triton"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    plan = choose_plan(RunOptions(device="cpu", attention="triton"), make_files(), find_gpus=Gpus)
    assert (plan.info.device, plan.info.attention) == ("cpu", "triton")


def test_several_processes_share_cores_or_have_a_gpu_each() -> None:
    options = RunOptions(device="cpu", tensor_parallel_size=2)
    info = choose_plan(options, make_files(), find_gpus=Gpus).info
    assert info.tensor_parallel_size == 2
    assert info.threads == max(1, usable_cores() // 2)
    note = choose_plan(options, make_files(), find_gpus=Gpus).note
    assert note == (
        "The plain torch path serves, several times slower: tensor_parallel_size is 2, but the native "
        "kernels are for a single process."
    )
    for other in (
        replace(options, kernels="torch"),
        replace(options, attention="reference"),
        replace(options, dtype="fp32"),
    ):
        assert choose_plan(other, make_files(), find_gpus=Gpus).note is None
    options = replace(options, num_threads=7)
    assert choose_plan(options, make_files(), find_gpus=Gpus).info.place == "2 processes of 3 threads"
    two = Gpus(2, (9, 0))
    plan = choose_plan(RunOptions(tensor_parallel_size=2), make_files(), find_gpus=lambda: two)
    assert (plan.info.place, plan.is_native) == ("2 cuda devices", False)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 3, but .* one GPU; use at most 1"):
        choose(RunOptions(tensor_parallel_size=3), gpus=AMPERE)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 3, but torch sees 2 GPUs; use at most 2"):
        choose(RunOptions(tensor_parallel_size=3), gpus=two)


def test_several_processes_have_no_host_tier() -> None:
    refuse_host_tier(RunOptions(), 2**20)
    refuse_host_tier(RunOptions(tensor_parallel_size=2), 0)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 2, but swap_memory is not 0"):
        refuse_host_tier(RunOptions(tensor_parallel_size=2), 2**20)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"kernels": "avx512"}, r"kernels avx512 cannot be had.*can run avx512vnni, avx2, torch"),
        ({"kernels": "sse"}, "kernels is 'sse'; allowed: auto, avx512, .*torch"),
        ({"dtype": "fp8"}, "dtype is 'fp8'; allowed: auto, q4, int8, bf16, fp16, fp32"),
        ({"dtype": "fp16"}, "dtype is fp16, which is for GPUs.*use bf16 or fp32"),
        ({"dtype": "fp16", "kernels": "avx2"}, "kernels avx2 needs the native kernels, but dtype is fp16"),
        ({"attention": "flash"}, "attention is 'flash'; allowed: auto, triton, varlen, reference"),
        ({"attention": "varlen"}, "attention is varlen, which needs a GPU.*use auto or reference"),
        ({"attention": "reference", "dtype": "int8"}, "dtype int8 needs .* but attention is reference"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0; allowed: 1 to 64"),
        ({"tensor_parallel_size": 2, "kernels": "avx2"}, "kernels avx2 needs .*tensor_parallel_size is 2"),
        ({"tensor_parallel_size": 2, "kv_dtype": "int8"}, "kv_dtype int8 needs .*tensor_parallel_size is 2"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization is 0.0; allowed: above 0, up to 1"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization is nan"),
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
    plan = choose_plan(RunOptions(), files, find_gpus=Gpus)
    assert (plan.is_native, plan.info.dtype) == (False, "fp32")
    assert "plain torch path serves" in (plan.note or "")
    assert ("AVX2" if reason == "cpu" else "have 24") in (plan.note or "")
    for options in (RunOptions(dtype="int8"), RunOptions(kv_dtype="int8"), RunOptions(kernels="avx2")):
        with pytest.raises(ConfigError, match="cannot be had"):
            choose_plan(options, files, find_gpus=Gpus)


def test_threads_are_those_asked_for_or_the_cores_that_may_be_used() -> None:
    files = make_files()
    for kernels in ("auto", "torch"):
        options = RunOptions(kernels=kernels)
        assert choose_plan(options, files, find_gpus=Gpus).info.threads == usable_cores()
        options = replace(options, num_threads=3)
        info = choose_plan(options, files, find_gpus=Gpus).info
        assert info.threads == 3
        assert str(info).endswith("3 threads")
    assert choose_plan(RunOptions(), files, find_gpus=lambda: AMPERE).info.place == "cuda"
