"""Loads a model for the native kernels: library, packed weights, runner. No torch."""

from pathlib import Path

from engine.config import EngineConfig
from engine.engine_info import EngineInfo
from engine.errors import EngineInvariantError, KernelsUnavailableError
from engine.kernels.cpu.build import OnWait, build
from engine.kernels.cpu.library import NativeLibrary, NativeModel, NativeSizes
from engine.kernels.cpu.pack import pack_model
from engine.kernels.cpu.suitability import packed_bytes
from engine.machine import total_memory_bytes
from engine.model.check import ModelFiles
from engine.model.weight_reader import Report
from engine.runner.native_runner import NativeRunner


def open_library(isa: str, on_wait: OnWait) -> NativeLibrary:
    """Return the compiled kernels; compiles them if they are not there, once more if they are damaged.

    Raises `KernelsUnavailableError` if that is not possible.
    """
    path = build(isa, on_wait=on_wait)
    try:
        return NativeLibrary(path)
    except KernelsUnavailableError as error:
        _remove(path, error)
        return NativeLibrary(build(isa, on_wait=on_wait))


def _remove(path: Path, fault: KernelsUnavailableError) -> None:
    """Remove a library that cannot be loaded; if that fails too, raise both reasons as one line."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise KernelsUnavailableError(f"{fault} The server was not allowed to ({error.strerror}).") from error


class NativeBackend:
    """A model on its way into the native kernels."""

    def __init__(self, files: ModelFiles, info: EngineInfo, library: NativeLibrary) -> None:
        """Read nothing yet."""
        self._files = files
        self._info = info
        self._library = library
        self._model: NativeModel | None = None

    @property
    def available_bytes(self) -> int:
        """Memory of the machine."""
        return total_memory_bytes()

    @property
    def weight_bytes(self) -> int:
        """About what the packed weights take."""
        return packed_bytes(self._files, self._info.dtype)

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Return what one block takes over all layers."""
        return self._library.kv_bytes_per_block(self._files.config, self._make_sizes(2, block_size, 1))

    def load_weights(self, config: EngineConfig, on_share: Report) -> None:
        """Pack all weights; also reserves the KV pool, whose pages are taken when used."""
        sizes = self._make_sizes(config.max_model_len, config.block_size, config.num_blocks)
        self._model = pack_model(self._library, self._files, sizes, on_share)

    def find_kv_memory(self, config: EngineConfig) -> None:  # noqa: ARG002 - the interface has it
        """Return None: a pool in the machine's memory has the size that was asked for."""
        return

    def make_runner(self, config: EngineConfig, eos_token_ids: frozenset[int]) -> NativeRunner:
        """Return the runner of the loaded model; reserves the host tier, whose pages are taken when used."""
        if self._model is None:
            raise EngineInvariantError("the weights are not loaded")
        return NativeRunner(self._model, eos_token_ids=eos_token_ids, num_host_blocks=config.num_host_blocks)

    def _make_sizes(self, num_positions: int, block_size: int, num_blocks: int) -> NativeSizes:
        return NativeSizes(
            num_positions=num_positions,
            block_size=block_size,
            num_blocks=num_blocks,
            dtype=self._info.dtype,
            kv_dtype=self._info.kv_dtype,
            num_threads=self._info.threads,
        )
