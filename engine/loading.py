"""From a model on disk to an engine that is ready to step.

Importing this module imports torch: do it in the engine thread, once.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import EngineConfig, resolve
from engine.core import EngineCore
from engine.errors import ConfigError
from engine.model.check import ModelFiles, ModelInfo, open_model
from engine.model.decoder import Decoder
from engine.model.tokenizer import Tokenizer
from engine.model.tokenizer_store import load_tokenizer
from engine.model.weights import load_weights
from engine.runner.torch_runner import TorchRunner

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "fp32", "bf16", "int8", "q4")

_TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# Where each stage begins on the way from 0 to 1, as measured with the default model on two cores.
_STAGES = {"header": 0.0, "weights": 0.02, "tokenizer": 0.85, "kv_pool": 0.93, "warm_up": 0.95, "ready": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """What to load and how.

    `kv_memory_bytes` sizes the KV pool; None: `config.num_blocks` counts. `device`: one of `DEVICES`;
    `dtype`: one of `DTYPES` ("auto": fp32 on the CPU, bf16 on CUDA). `num_threads`: threads of one step
    on the CPU; None: one per core. `cache_dir`: where converted tokenizers are kept.
    """

    model_path: Path
    config: EngineConfig
    cache_dir: Path
    kv_memory_bytes: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    num_threads: int | None = None


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """What is being done and how far the whole load is, 0 to 1.

    `stage` is header, weights, tokenizer, kv_pool, warm_up or ready. Within weights the fraction grows
    with the bytes that are loaded.
    """

    stage: str
    fraction: float


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine that is ready. `core.config` is the resolved configuration."""

    core: EngineCore
    tokenizer: Tokenizer
    model_name: str
    model_info: ModelInfo


Report = Callable[[LoadProgress], None]


def load_engine(request: LoadRequest, on_progress: Report) -> LoadedEngine:
    """Load a model and build its engine, in the calling thread (which shall own the engine).

    Raises `ModelError` or `ConfigError` with a one-line message for whatever the files, the settings
    or the machine do not allow.
    """
    device, dtype = _choose(request)
    _report(on_progress, "header")
    files = open_model(request.model_path)
    config = resolve(
        request.config,
        model_max_len=files.config.max_position,
        kv_bytes_per_token=files.config.kv_bytes_per_token(dtype.itemsize),
        kv_memory_bytes=request.kv_memory_bytes,
    )
    _check_memory(files, config, device, dtype)
    if request.num_threads is not None:
        torch.set_num_threads(request.num_threads)
    # The tokenizer's part is imports and parsing on one core; the weights' part leaves the interpreter free.
    with ThreadPoolExecutor(1, "tokenizer-loader") as pool:
        pending = pool.submit(load_tokenizer, files, request.cache_dir)
        decoder = _load_decoder(files, config, (device, dtype), on_progress)
        _report(on_progress, "tokenizer")
        tokenizer = pending.result()
    _report(on_progress, "kv_pool")
    with _explained("The KV pool", "a smaller --kv-memory or --num-blocks"):
        runner = TorchRunner(
            decoder,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            eos_token_ids=tokenizer.eos_token_ids,
        )
        _report(on_progress, "warm_up")
        runner.warm_up()
    core = EngineCore(config, runner)
    _report(on_progress, "ready")
    return LoadedEngine(core, tokenizer, files.info.name, files.info)


def _choose(request: LoadRequest) -> tuple[torch.device, torch.dtype]:
    if request.device not in DEVICES:
        raise ConfigError(f"device is {request.device!r}; allowed: {', '.join(DEVICES)}.")
    if request.dtype not in DTYPES:
        raise ConfigError(f"dtype is {request.dtype!r}; allowed: {', '.join(DTYPES)}.")
    if request.num_threads is not None and request.num_threads < 1:
        raise ConfigError(f"num_threads is {request.num_threads}; allowed: 1 or more.")
    if request.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no CUDA device here; use cpu or auto.")
    if request.dtype in ("int8", "q4"):
        raise ConfigError(
            f"dtype {request.dtype} needs the native kernels, which this version does not have; "
            "use auto, fp32 or bf16."
        )
    use_cuda = request.device != "cpu" and torch.cuda.is_available()
    automatic = torch.bfloat16 if use_cuda else torch.float32
    return torch.device("cuda" if use_cuda else "cpu"), _TORCH_DTYPES.get(request.dtype, automatic)


def _load_decoder(
    files: ModelFiles, config: EngineConfig, place: tuple[torch.device, torch.dtype], on_progress: Report
) -> Decoder:
    device, dtype = place
    start, end = _STAGES["weights"], _STAGES["tokenizer"]

    def on_share(share: float) -> None:
        on_progress(LoadProgress("weights", start + (end - start) * share))

    with torch.inference_mode(), _explained("The model", "a smaller model"):
        weights = load_weights(files, dtype, device, on_share)
        return Decoder(files.config, weights, config.max_model_len)


def _check_memory(files: ModelFiles, config: EngineConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse a pool that this machine cannot hold: the system would only say so by ending the process."""
    per_token = files.config.kv_bytes_per_token(dtype.itemsize)
    pool_bytes = per_token * config.block_size * config.num_blocks
    weight_bytes = files.info.num_parameters * dtype.itemsize
    if device.type == "cpu":
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        available = torch.cuda.mem_get_info(device)[0]
    if pool_bytes + weight_bytes > available:
        raise ConfigError(
            f"A KV pool of {pool_bytes:,} bytes and weights of {weight_bytes:,} bytes do not fit into "
            f"{available:,} bytes of memory; use a smaller --kv-memory or --num-blocks."
        )


@contextmanager
def _explained(what: str, advice: str) -> Iterator[None]:
    """Turn torch's out-of-memory errors into one that says what to do."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        is_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(
            error
        )
        if not is_memory:
            raise
        raise ConfigError(f"{what} does not fit into memory; use {advice}.") from error


def _report(on_progress: Report, stage: str) -> None:
    on_progress(LoadProgress(stage, _STAGES[stage]))
