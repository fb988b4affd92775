"""Chooses how a model is run: device, kernels and number formats, from what is asked for and what is there.

Imports neither torch nor numpy, so that the server can refuse before it starts.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.engine_info import NATIVE, TORCH, EngineInfo
from engine.errors import ConfigError
from engine.kernels.cpu.build import unsupported_cpu_message
from engine.kernels.cpu.instruction_sets import INSTRUCTION_SETS, runnable
from engine.kernels.cpu.suitability import find_obstacle, has_four_bit_weights, is_mostly_four_bit
from engine.machine import Gpus, is_triton_interpreted, usable_cores
from engine.model.check import ModelFiles
from engine.runner.attention_choice import ATTENTIONS, AUTO, REFERENCE, TRITON

DEVICES = (AUTO, "cpu", "cuda")
DTYPES = (AUTO, "q4", "int8", "bf16", "fp16", "fp32")
KV_DTYPES = (AUTO, "bf16", "int8")
KERNELS = (AUTO, *INSTRUCTION_SETS, TORCH)
MAX_PROCESSES = 64

_TORCH_DTYPES = {"cpu": ("fp32", "bf16"), "cuda": ("bf16", "fp16", "fp32")}
_BF16_CAPABILITY = (8, 0)
"""GPUs before have no arithmetic of bf16; torch would imitate it."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a model is asked to be run.

    `device`, `dtype`, `kv_dtype`, `kernels` and `attention` are one of `DEVICES`, `DTYPES`, `KV_DTYPES`,
    `KERNELS`, `ATTENTIONS`. "auto" is: CUDA if there is a GPU and nothing else needs the CPU; the best
    kernels that the CPU has; the weights as the file has them if it has mostly four bits, else int8 (torch:
    fp32 on the CPU; on CUDA bf16, or fp16 where the GPU has no bf16); a bf16 KV cache (torch: as the
    weights); the best attention that torch and GPU allow. `num_threads`: threads of one step on the CPU, in
    all processes; None: one per core. `tensor_parallel_size`: processes that compute the model together, in
    torch.

    On CUDA only: `gpu_memory_utilization` is the share of the GPU's memory that weights, KV pool and working
    memory may take together, where no size of the pool is asked for. `async_scheduling`: whether the GPU
    computes ahead of the scheduler. `cuda_graphs`: whether decode steps are captured.
    """

    device: str = AUTO
    dtype: str = AUTO
    kv_dtype: str = AUTO
    kernels: str = AUTO
    attention: str = AUTO
    num_threads: int | None = None
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    async_scheduling: bool = True
    cuda_graphs: bool = True

    @property
    def needs_kernels(self) -> str | None:
        """Return the option that only the native kernels can fulfil, None if there is none."""
        if self.dtype in ("q4", "int8"):
            return f"dtype {self.dtype}"
        if self.kv_dtype == "int8":
            return "kv_dtype int8"
        return f"kernels {self.kernels}" if self.kernels in INSTRUCTION_SETS else None

    @property
    def needs_torch(self) -> str | None:
        """Return the option, beside `kernels`, that only torch can fulfil, None if there is none."""
        if self.attention != AUTO:
            return f"attention is {self.attention}"
        if self.tensor_parallel_size > 1:
            return f"tensor_parallel_size is {self.tensor_parallel_size}"
        return "dtype is fp16" if self.dtype == "fp16" else None


@dataclass(frozen=True)
class RunPlan:
    """What was chosen, and a sentence about it where it is not what somebody might expect.

    On a GPU `info.attention` is what was asked for until torch is there: see `attention_choice`.
    """

    info: EngineInfo
    note: str | None = None

    @property
    def is_native(self) -> bool:
        """Whether the native kernels run the model."""
        return self.info.kernels != TORCH


def choose_plan(options: RunOptions, files: ModelFiles, *, find_gpus: Callable[[], Gpus]) -> RunPlan:
    """Return how the model will be run; raises `ConfigError` for what does not go together.

    `find_gpus` is asked only where the answer matters: finding out takes seconds.
    """
    _check_values(options)
    if options.device == "cuda" and options.needs_kernels is not None:
        raise ConfigError(
            f"{options.needs_kernels} needs the native kernels, which run on the CPU, but device is cuda; "
            "give up one of them."
        )
    if options.needs_kernels is not None and options.needs_torch is not None:
        raise ConfigError(
            f"{options.needs_kernels} needs the native kernels, but {options.needs_torch}, which only torch "
            "can do; give up one of them."
        )
    gpus = Gpus()
    if options.device == "cuda" or (options.device == AUTO and options.needs_kernels is None):
        gpus = find_gpus()
    if options.device == "cuda" or gpus.count:
        return _plan_cuda(options, gpus)
    plan = _plan_cpu(options, files)
    if gpus.obstacle is not None:
        note = f"There seems to be a GPU, but torch cannot use it: {gpus.obstacle}. The CPU serves."
        plan = replace(plan, note=note if plan.note is None else f"{note} {plan.note}")
    return plan


def refuse_host_tier(options: RunOptions, size: int) -> None:
    """Raise `ConfigError` if a host tier, of `size` bytes or blocks, cannot go with the other options."""
    if size and options.tensor_parallel_size > 1:
        raise ConfigError(
            f"tensor_parallel_size is {options.tensor_parallel_size}, but swap_memory is not 0: only a "
            "single process can keep blocks in host memory; give up one of them."
        )


def _check_values(options: RunOptions) -> None:
    for name, value, allowed in (
        ("device", options.device, DEVICES),
        ("dtype", options.dtype, DTYPES),
        ("kv_dtype", options.kv_dtype, KV_DTYPES),
        ("kernels", options.kernels, KERNELS),
        ("attention", options.attention, ATTENTIONS),
    ):
        if value not in allowed:
            raise ConfigError(f"{name} is {value!r}; allowed: {', '.join(allowed)}.")
    if options.num_threads is not None and options.num_threads < 1:
        raise ConfigError(f"num_threads is {options.num_threads}; allowed: 1 or more.")
    if not 1 <= options.tensor_parallel_size <= MAX_PROCESSES:
        raise ConfigError(
            f"tensor_parallel_size is {options.tensor_parallel_size}; allowed: 1 to {MAX_PROCESSES}."
        )
    if not 0 < options.gpu_memory_utilization <= 1:
        raise ConfigError(
            f"gpu_memory_utilization is {options.gpu_memory_utilization}; allowed: above 0, up to 1."
        )


# ---------------------------------------------------------------------- on a GPU


def _plan_cuda(options: RunOptions, gpus: Gpus) -> RunPlan:
    if not gpus.count:
        reason = (
            f"torch cannot use a GPU: {gpus.obstacle}" if gpus.obstacle else "torch sees no CUDA device here"
        )
        raise ConfigError(f"device is cuda, but {reason}; use cpu or auto.")
    if options.tensor_parallel_size > gpus.count:
        there = "one GPU" if gpus.count == 1 else f"{gpus.count} GPUs"
        raise ConfigError(
            f"tensor_parallel_size is {options.tensor_parallel_size}, but torch sees {there}; use at most "
            f"{gpus.count}, or device cpu."
        )
    has_bf16 = gpus.capability >= _BF16_CAPABILITY
    if options.dtype == "bf16" and not has_bf16:
        major, minor = gpus.capability
        raise ConfigError(
            f"dtype is bf16, which the GPU (compute capability {major}.{minor}) cannot compute with; "
            "use fp16 or fp32."
        )
    note = None
    if options.dtype == AUTO and not has_bf16:
        note = "The GPU cannot compute in bf16: weights and KV cache are fp16."
    plan = _plan_torch(options, "cuda", "bf16" if has_bf16 else "fp16")
    return replace(plan, note=note)


# ---------------------------------------------------------------------- on the CPU


def _plan_cpu(options: RunOptions, files: ModelFiles) -> RunPlan:
    _refuse_on_cpu(options)
    if options.kernels == TORCH or options.needs_torch is not None:
        return replace(_plan_torch(options, "cpu", "fp32"), note=_note_processes(options))
    if options.kernels == AUTO and options.dtype == "fp32" and options.kv_dtype == AUTO:
        # Natively the KV cache would be rounded; who asks for fp32 wants exact numbers.
        return _plan_torch(options, "cpu", "fp32")
    obstacle = _find_obstacle(options, files)
    if obstacle is None:
        return _plan_native(options, files)
    if options.needs_kernels is not None:
        raise ConfigError(f"{options.needs_kernels} cannot be had: {obstacle}.")
    plan = _plan_torch(options, "cpu", "fp32")
    return replace(plan, note=f"The plain torch path serves, several times slower: {obstacle}.")


def _note_processes(options: RunOptions) -> str | None:
    """Return what several processes cost, unless something else asks for torch, too."""
    asks_for_torch = options.kernels == TORCH or options.attention != AUTO or options.dtype == "fp32"
    if options.tensor_parallel_size == 1 or asks_for_torch:
        return None
    return (
        f"The plain torch path serves, several times slower: tensor_parallel_size is "
        f"{options.tensor_parallel_size}, but the native kernels are for a single process."
    )


def _refuse_on_cpu(options: RunOptions) -> None:
    """Refuse what only a GPU can do."""
    allowed = (AUTO, REFERENCE, TRITON) if is_triton_interpreted() else (AUTO, REFERENCE)
    if options.attention not in allowed:
        raise ConfigError(
            f"attention is {options.attention}, which needs a GPU, but the model runs on the CPU; "
            "use auto or reference."
        )
    if options.dtype == "fp16":
        raise ConfigError(
            "dtype is fp16, which is for GPUs, but the model runs on the CPU; use bf16 or fp32."
        )


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
    if dtype == AUTO:
        dtype = "q4" if is_mostly_four_bit(files) else "int8"
    if dtype == "q4" and not has_four_bit_weights(files):
        raise ConfigError(
            f"dtype is q4, but {files.path.name} has no weights of four bits (Q4_0 or Q4_1; most are "
            f"{files.info.storage}); use auto, int8 or bf16."
        )
    return RunPlan(
        EngineInfo(
            device="cpu",
            kernels=runnable()[0] if options.kernels == AUTO else options.kernels,
            dtype=dtype,
            kv_dtype="bf16" if options.kv_dtype == AUTO else options.kv_dtype,
            threads=options.num_threads or usable_cores(),
            attention=NATIVE,
        )
    )


# ---------------------------------------------------------------------- in torch


def _plan_torch(options: RunOptions, device: str, usual_dtype: str) -> RunPlan:
    dtype, num_processes = options.dtype, options.tensor_parallel_size
    if dtype == AUTO:
        dtype = usual_dtype
    allowed = _TORCH_DTYPES[device]
    if dtype not in allowed:
        raise ConfigError(
            f"dtype {dtype} needs the native kernels, but kernels is torch; use {' or '.join(allowed)}."
        )
    if options.kv_dtype not in (AUTO, dtype):
        raise ConfigError(
            f"kv_dtype is {options.kv_dtype}, but torch keeps keys and values as the weights, in {dtype}; "
            "use auto, or native kernels."
        )
    attention = options.attention
    if attention == AUTO and device == "cpu":
        attention = REFERENCE
    threads = 0
    if device == "cpu":
        threads = max(1, (options.num_threads or usable_cores()) // num_processes)
    return RunPlan(
        EngineInfo(
            device=device,
            kernels=TORCH,
            dtype=dtype,
            kv_dtype=dtype,
            threads=threads,
            attention=attention,
            tensor_parallel_size=num_processes,
        )
    )
