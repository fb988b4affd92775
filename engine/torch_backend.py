"""Loads a model for plain torch, on the CPU or on CUDA. Importing this imports torch."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.config import EngineConfig
from engine.engine_info import EngineInfo
from engine.errors import EngineInvariantError
from engine.machine import total_memory_bytes
from engine.model.check import ModelFiles
from engine.model.decoder import Decoder
from engine.model.weight_reader import Report
from engine.model.weights import load_weights
from engine.runner.torch_runner import TorchRunner

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def has_cuda() -> bool:
    """Whether torch can use a GPU."""
    return bool(torch.cuda.is_available())


class TorchBackend:
    """A model on its way into torch."""

    def __init__(self, files: ModelFiles, info: EngineInfo) -> None:
        """Read nothing yet; sets torch's threads."""
        self._files = files
        self._device = torch.device(info.device)
        self._dtype = _DTYPES[info.dtype]
        self._decoder: Decoder | None = None
        if info.threads:
            torch.set_num_threads(info.threads)

    @property
    def available_bytes(self) -> int:
        """Memory of the machine, or what is free on the GPU."""
        if self._device.type == "cpu":
            return total_memory_bytes()
        free_bytes: int = torch.cuda.mem_get_info(self._device)[0]
        return free_bytes

    @property
    def weight_bytes(self) -> int:
        """What the weights take."""
        return self._files.info.num_parameters * self._dtype.itemsize

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Return what one block takes over all layers."""
        return self._files.config.kv_bytes_per_token(self._dtype.itemsize) * block_size

    def load_weights(self, config: EngineConfig, on_share: Report) -> None:
        """Read all weights."""
        with torch.inference_mode(), _memory_errors():
            weights = load_weights(self._files, self._dtype, self._device, on_share)
            self._decoder = Decoder(self._files.config, weights, config.max_model_len)

    def make_runner(self, config: EngineConfig, eos_token_ids: frozenset[int]) -> TorchRunner:
        """Return the runner of the loaded model; allocates KV pool and host tier."""
        if self._decoder is None:
            raise EngineInvariantError("the weights are not loaded")
        with _memory_errors():
            return TorchRunner(
                self._decoder,
                num_blocks=config.num_blocks,
                block_size=config.block_size,
                eos_token_ids=eos_token_ids,
                num_host_blocks=config.num_host_blocks,
            )


@contextmanager
def _memory_errors() -> Iterator[None]:
    """Turn torch's several out-of-memory errors into Python's."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
            raise MemoryError(str(error)) from error
        raise
