"""Chooses how a model is run: device, kernels and number formats, from what is asked for and what is there.

Imports neither torch nor numpy, so that the server can refuse before it starts.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.engine_info import EngineInfo
from engine.errors import ConfigError
from engine.kernels.cpu.build import unsupported_cpu_message
from engine.kernels.cpu.instruction_sets import INSTRUCTION_SETS, runnable
from engine.kernels.cpu.suitability import find_obstacle, has_four_bit_weights, is_mostly_four_bit
from engine.machine import usable_cores
from engine.model.check import ModelFiles

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "q4", "int8", "bf16", "fp32")
KV_DTYPES = ("auto", "bf16", "int8")
KERNELS = ("auto", *INSTRUCTION_SETS, "torch")

TORCH = "torch"
_TORCH_DTYPES = ("fp32", "bf16")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a model is asked to be run.

    `device`, `dtype`, `kv_dtype` and `kernels` are one of `DEVICES`, `DTYPES`, `KV_DTYPES`, `KERNELS`.
    "auto" is: CUDA if there is a GPU and nothing else needs the CPU; the best kernels that the CPU has; the
    weights as the file has them if it has mostly four bits, else int8 (torch: fp32 on the CPU, bf16 on
    CUDA); a bf16 KV cache (torch: as the weights). `num_threads`: threads of one step on the CPU; None: one
    per core.
    """

    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    kernels: str = "auto"
    num_threads: int | None = None

    @property
    def needs_kernels(self) -> str | None:
        """Return the option that only the native kernels can fulfil, None if there is none."""
        if self.dtype in DTYPES and self.dtype not in ("auto", *_TORCH_DTYPES):
            return f"dtype {self.dtype}"
        if self.kv_dtype == "int8":
            return "kv_dtype int8"
        return f"kernels {self.kernels}" if self.kernels in INSTRUCTION_SETS else None


@dataclass(frozen=True)
class RunPlan:
    """What was chosen, and a sentence about it where it is not what somebody might expect."""

    info: EngineInfo
    note: str | None = None

    @property
    def is_native(self) -> bool:
        """Whether the native kernels run the model."""
        return self.info.kernels != TORCH


def choose_plan(options: RunOptions, files: ModelFiles, *, has_cuda: Callable[[], bool]) -> RunPlan:
    """Return how the model will be run; raises `ConfigError` for what does not go together.

    `has_cuda` is asked only where the answer matters: finding out takes seconds.
    """
    _check_names(options)
    if options.device == "cuda":
        _refuse_on_cuda(options, has_cuda)
        return _plan_torch(options, "cuda")
    if options.device == "auto" and options.needs_kernels is None and has_cuda():
        return _plan_torch(options, "cuda")
    if options.kernels == TORCH:
        return _plan_torch(options, "cpu")
    if options.kernels == "auto" and options.dtype == "fp32" and options.kv_dtype == "auto":
        # Natively the KV cache would be rounded; who asks for fp32 wants exact numbers.
        return _plan_torch(options, "cpu")
    obstacle = _find_obstacle(options, files)
    if obstacle is None:
        return _plan_native(options, files)
    if options.needs_kernels is not None:
        raise ConfigError(f"{options.needs_kernels} cannot be had: {obstacle}.")
    plan = _plan_torch(options, "cpu")
    return replace(plan, note=f"The plain torch path serves, several times slower: {obstacle}.")


def _check_names(options: RunOptions) -> None:
    for name, value, allowed in (
        ("device", options.device, DEVICES),
        ("dtype", options.dtype, DTYPES),
        ("kv_dtype", options.kv_dtype, KV_DTYPES),
        ("kernels", options.kernels, KERNELS),
    ):
        if value not in allowed:
            raise ConfigError(f"{name} is {value!r}; allowed: {', '.join(allowed)}.")
    if options.num_threads is not None and options.num_threads < 1:
        raise ConfigError(f"num_threads is {options.num_threads}; allowed: 1 or more.")


def _refuse_on_cuda(options: RunOptions, has_cuda: Callable[[], bool]) -> None:
    if options.needs_kernels is not None:
        raise ConfigError(
            f"{options.needs_kernels} needs the native kernels, which run on the CPU, but device is cuda; "
            "give up one of them."
        )
    if not has_cuda():
        raise ConfigError("device is cuda, but torch sees no CUDA device here; use cpu or auto.")


def _find_obstacle(options: RunOptions, files: ModelFiles) -> str | None:
    """Return why the native kernels cannot run the model here."""
    present = runnable()
    if not present:
        return unsupported_cpu_message().removesuffix(".")
    if options.kernels in INSTRUCTION_SETS and options.kernels not in present:
        return f"this CPU lacks what it needs (it can run {', '.join((*present, TORCH))})"
    return find_obstacle(files.config)


def _plan_native(options: RunOptions, files: ModelFiles) -> RunPlan:
    dtype = options.dtype
    if dtype == "auto":
        dtype = "q4" if is_mostly_four_bit(files) else "int8"
    if dtype == "q4" and not has_four_bit_weights(files):
        raise ConfigError(
            f"dtype is q4, but {files.path.name} has no weights of four bits (Q4_0 or Q4_1; most are "
            f"{files.info.storage}); use auto, int8 or bf16."
        )
    return RunPlan(
        EngineInfo(
            device="cpu",
            kernels=runnable()[0] if options.kernels == "auto" else options.kernels,
            dtype=dtype,
            kv_dtype="bf16" if options.kv_dtype == "auto" else options.kv_dtype,
            threads=options.num_threads or usable_cores(),
        )
    )


def _plan_torch(options: RunOptions, device: str) -> RunPlan:
    dtype = options.dtype
    if dtype == "auto":
        dtype = "bf16" if device == "cuda" else "fp32"
    if dtype not in _TORCH_DTYPES:
        raise ConfigError(f"dtype {dtype} needs the native kernels, but kernels is torch; use fp32 or bf16.")
    if options.kv_dtype not in ("auto", dtype):
        raise ConfigError(
            f"kv_dtype is {options.kv_dtype}, but torch keeps keys and values as the weights, in {dtype}; "
            "use auto, or native kernels."
        )
    threads = (options.num_threads or usable_cores()) if device == "cpu" else 0
    return RunPlan(EngineInfo(device=device, kernels=TORCH, dtype=dtype, kv_dtype=dtype, threads=threads))
