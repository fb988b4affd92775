"""From a model on disk to an engine that is ready to step.

Loading takes seconds and memory: do it in the engine thread, once. torch is imported only where it runs the
model, or where a GPU has to be looked for.
"""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import msgspec

from engine.config import AS_SUITS, EngineConfig, resolve
from engine.core import EngineCore
from engine.engine_info import TORCH, EngineInfo
from engine.errors import ConfigError, KernelsUnavailableError
from engine.kernels.cpu.build import TYPICAL_BUILD_S
from engine.machine import Gpus, may_have_gpu, total_memory_bytes
from engine.model.check import ModelFiles, ModelInfo, open_model
from engine.model.tokenizer import Tokenizer
from engine.model.tokenizer_store import load_tokenizer
from engine.model.weight_reader import Report as OnShare
from engine.run_plan import RunOptions, RunPlan, choose_plan, refuse_host_tier
from engine.runner.attention_choice import REFERENCE, choose_attention
from engine.runner.base import ModelRunner
from engine.runner.warm_up import measure_token_ns

logger = logging.getLogger(__name__)

# Where each stage begins on the way from 0 to 1, as measured with the default model on two cores.
_STAGES = {"header": 0.0, "weights": 0.02, "tokenizer": 0.85, "kv_pool": 0.93, "warm_up": 0.95, "ready": 1.0}

_BUILD_SHARE = 0.9
"""Share of the whole load that compiling the kernels is, where that has to be done."""


@dataclass(frozen=True, kw_only=True)
class LoadRequest(RunOptions):
    """What to load and how.

    `kv_memory_bytes` sizes the KV pool; None: `config.num_blocks` counts, and if that is left open, too, what
    suits the device: on a GPU as much as is left of `gpu_memory_utilization`. `swap_memory_bytes` sizes the
    host tier; 0: `config.num_host_blocks` counts. `cache_dir`: where converted tokenizers are kept. The other
    fields say how to run it, see `RunOptions`.
    """

    model_path: Path
    config: EngineConfig
    cache_dir: Path
    kv_memory_bytes: int | None = None
    swap_memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """What is being done and how far the whole load is, 0 to 1.

    `stage` is header, kernels, weights, tokenizer, kv_pool (which on a GPU begins with measuring how large it
    may be), warm_up or ready. Within kernels, which appears
    only where they have to be compiled, the fraction grows with time; within weights with the bytes loaded.
    """

    stage: str
    fraction: float


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine that is ready. `core.config` is the resolved configuration, `info` how the model is run."""

    core: EngineCore
    tokenizer: Tokenizer
    model_name: str
    model_info: ModelInfo
    info: EngineInfo


class _WarmRunner(ModelRunner, Protocol):
    def warm_up(self) -> None: ...
    def measure_block_ns(self) -> float: ...


class _Backend(Protocol):
    """A way to run a model: `native_backend` or `torch_backend`."""

    @property
    def available_bytes(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...
    def kv_bytes_per_block(self, block_size: int) -> int: ...
    def load_weights(self, config: EngineConfig, on_share: OnShare) -> None: ...
    def find_kv_memory(self, config: EngineConfig) -> int | None: ...
    def make_runner(self, config: EngineConfig, eos_token_ids: frozenset[int]) -> _WarmRunner: ...


class _Reporter:
    """Turns stages into progress that only grows."""

    def __init__(self, on_progress: Callable[[LoadProgress], None]) -> None:
        self._on_progress = on_progress
        self._start = 0.0

    def enter(self, stage: str) -> None:
        self._report(stage, _STAGES[stage])

    def on_share(self, share: float) -> None:
        """Take how much of the weights is loaded."""
        start, end = _STAGES["weights"], _STAGES["tokenizer"]
        self._report("weights", start + (end - start) * share)

    def on_build(self, waited_s: float) -> None:
        """Take how long the kernels are being compiled; all that follows is the rest."""
        self._start = _BUILD_SHARE * min(waited_s / TYPICAL_BUILD_S, 1.0)
        self._on_progress(LoadProgress("kernels", self._start))

    def _report(self, stage: str, fraction: float) -> None:
        self._on_progress(LoadProgress(stage, self._start + (1 - self._start) * fraction))


def load_engine(request: LoadRequest, on_progress: Callable[[LoadProgress], None]) -> LoadedEngine:
    """Load a model and build its engine, in the calling thread (which shall own the engine).

    Raises `ModelError` or `ConfigError` with a one-line message for whatever the files, the settings
    or the machine do not allow.
    """
    reporter = _Reporter(on_progress)
    reporter.enter("header")
    files = open_model(request.model_path)
    refuse_host_tier(request, request.swap_memory_bytes or request.config.num_host_blocks)
    plan = choose_plan(request, files, find_gpus=lambda: _find_gpus(request))
    # The tokenizer's part is imports and parsing on one core; the weights' part leaves the interpreter free.
    with ThreadPoolExecutor(1, "tokenizer-loader") as pool:
        pending = pool.submit(load_tokenizer, files, request.cache_dir)
        plan, backend = _open_backend(request, files, plan, reporter)
        pool_size = _PoolSize(request, files, plan.info.device, backend)
        config = pool_size.resolve_first()
        with _explained("The model", "a smaller model, or a smaller --kv-memory or --num-blocks"):
            backend.load_weights(config, reporter.on_share)
        reporter.enter("tokenizer")
        tokenizer = pending.result()
    reporter.enter("kv_pool")
    config = pool_size.resolve_again(config)
    with _explained("The KV pool", f"{pool_size.advice} or --swap-memory"):
        runner = backend.make_runner(config, tokenizer.eos_token_ids)
        reporter.enter("warm_up")
        runner.warm_up()
        config = _measure_costs(runner, config)
    core = EngineCore(config, runner)
    logger.info("%s: %s", files.info.name, plan.info)
    reporter.enter("ready")
    return LoadedEngine(core, tokenizer, files.info.name, files.info, plan.info)


class _PoolSize:
    """Resolves the configuration: before the weights are loaded, or on a GPU after it, when all is known."""

    def __init__(self, request: LoadRequest, files: ModelFiles, device: str, backend: _Backend) -> None:
        self._request = request
        self._device = device
        self._backend = backend
        self._max_position = files.config.max_position
        self._block_bytes = backend.kv_bytes_per_block(request.config.block_size)
        is_open = request.kv_memory_bytes is None and request.config.num_blocks == AS_SUITS
        self._is_measured = is_open and device == "cuda"

    @property
    def advice(self) -> str:
        """What makes the pool smaller."""
        if self._is_measured:
            return "a smaller --gpu-memory-utilization"
        return "a smaller --kv-memory, --num-blocks"

    def resolve_first(self) -> EngineConfig:
        """Return the configuration; if the pool's size has to be measured, with one for a single sequence."""
        if not self._is_measured:
            config = self._resolve(self._request.kv_memory_bytes)
            self._check_memory(config, config.num_blocks * self._block_bytes)
            return config
        max_model_len = min(self._request.config.max_model_len, self._max_position)
        num_blocks = -(-max_model_len // self._request.config.block_size)
        config = self._resolve(num_blocks * self._block_bytes)
        self._check_memory(config, 0)
        return config

    def resolve_again(self, config: EngineConfig) -> EngineConfig:
        """Return the final configuration, once the weights are loaded."""
        if not self._is_measured:
            return config
        with _explained("A step of the model", "a smaller --max-num-batched-tokens or --max-num-seqs"):
            return self._resolve(self._backend.find_kv_memory(config))

    def _resolve(self, kv_memory_bytes: int | None) -> EngineConfig:
        return resolve(
            self._request.config,
            device=self._device,
            model_max_len=self._max_position,
            kv_bytes_per_block=self._block_bytes,
            kv_memory_bytes=kv_memory_bytes,
            swap_memory_bytes=self._request.swap_memory_bytes,
        )

    def _check_memory(self, config: EngineConfig, pool_bytes: int) -> None:
        """Refuse what this machine cannot hold: the system would only say so by ending the process."""
        available_bytes, weight_bytes = self._backend.available_bytes, self._backend.weight_bytes
        if pool_bytes + weight_bytes > available_bytes:
            what, advice = f"A KV pool of {pool_bytes:,} bytes and weights", "--kv-memory or --num-blocks"
            if self._is_measured:
                what, advice = "Weights", "model"
            where = "on the GPU" if self._device == "cuda" else "of memory"
            raise ConfigError(
                f"{what} of {weight_bytes:,} bytes do not fit into {available_bytes:,} bytes {where}; "
                f"use a smaller {advice}."
            )
        left_bytes = total_memory_bytes()
        if self._device == "cpu":
            left_bytes = available_bytes - pool_bytes - weight_bytes
        host_bytes = self._block_bytes * config.num_host_blocks
        if host_bytes > left_bytes:
            raise ConfigError(
                f"A host tier of {host_bytes:,} bytes does not fit into the {left_bytes:,} bytes of memory "
                "that are left for it; use a smaller --swap-memory."
            )


def _open_backend(
    request: LoadRequest, files: ModelFiles, plan: RunPlan, reporter: _Reporter
) -> tuple[RunPlan, _Backend]:
    """Return the way to run the model, and the plan that it follows: torch's where there are no kernels."""
    if plan.is_native:
        from engine.native_backend import NativeBackend, open_library  # noqa: PLC0415 - numpy, if wanted

        try:
            library = open_library(plan.info.kernels, reporter.on_build)
        except KernelsUnavailableError as error:
            plan = _replace_plan(request, files, error)
        else:
            _log_note(plan.note)
            return plan, NativeBackend(files, plan.info, library)
    from engine.torch_backend import TorchBackend  # noqa: PLC0415 - imports torch, which takes seconds

    note = plan.note
    if plan.info.attention != REFERENCE:
        plan = _settle_attention(plan, files, request.config.block_size)
    backend = TorchBackend(files, plan.info, request)
    _log_note(note)  # after all that may be refused
    return plan, backend


def _settle_attention(plan: RunPlan, files: ModelFiles, block_size: int) -> RunPlan:
    """Return the plan with the attention that can be had; `ConfigError` if it is not the one asked for."""
    from engine.runner.torch_facts import find_attention_facts  # noqa: PLC0415 - imports torch

    facts = find_attention_facts(plan.info, files.config, block_size)
    choice = choose_attention(plan.info.attention, facts)
    _log_note(choice.note)
    return replace(plan, info=msgspec.structs.replace(plan.info, attention=choice.name))


def _log_note(note: str | None) -> None:
    if note is not None:
        logger.warning("%s", note)


def _replace_plan(request: LoadRequest, files: ModelFiles, error: KernelsUnavailableError) -> RunPlan:
    """Return the plan without kernels; raises the error where something asked for needs them."""
    if request.needs_kernels is not None:
        raise ConfigError(f"{request.needs_kernels} cannot be had. {error}") from error
    plan = choose_plan(replace(request, kernels=TORCH), files, find_gpus=Gpus)
    return replace(plan, note=f"{error} The plain torch path serves instead, several times slower.")


def _find_gpus(request: LoadRequest) -> Gpus:
    """Return what torch finds. It is not asked where there is no sign of a GPU, unless one is wanted."""
    if request.device != "cuda" and not may_have_gpu():
        return Gpus()
    from engine.runner.torch_facts import find_gpus  # noqa: PLC0415 - imports torch

    return find_gpus(request.tensor_parallel_size)


def _measure_costs(runner: _WarmRunner, config: EngineConfig) -> EngineConfig:
    """Return the configuration with the costs that decide between recomputing and swapping."""
    if config.num_host_blocks == 0:
        return config
    return msgspec.structs.replace(
        config,
        recompute_ns_per_token=measure_token_ns(runner, config),
        swap_ns_per_block=runner.measure_block_ns(),
    )


@contextmanager
def _explained(what: str, advice: str) -> Iterator[None]:
    """Turn out-of-memory errors into one that says what to do."""
    try:
        yield
    except MemoryError as error:
        raise ConfigError(f"{what} does not fit into memory; use {advice}.") from error
