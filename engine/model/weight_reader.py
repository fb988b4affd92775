"""A checked model's weights, one after the other, as they lie in its files; counts how far reading is."""

import mmap
from collections.abc import Callable
from pathlib import Path

from engine.errors import ModelError
from engine.model.check import ModelFiles
from engine.model.gguf import map_file
from engine.model.tensor_info import TensorInfo

Report = Callable[[float], None]
"""Takes the share of the weights that is loaded, 0 to 1 (by bytes in the file)."""


class WeightReader:
    """Maps the files of a model, each when its first tensor is asked for."""

    def __init__(self, files: ModelFiles, on_progress: Report) -> None:
        """Read nothing yet."""
        self._files = files
        self._on_progress = on_progress
        self._num_bytes_done = 0
        self._maps: dict[Path, mmap.mmap] = {}

    @property
    def is_interleaved(self) -> bool:
        """Whether rotary pairs are neighbours: GGUF files of the llama family hold q and k in that order."""
        return self._files.gguf is not None and self._files.config.architecture == "llama"

    def __contains__(self, name: str) -> bool:
        """Whether the model has this weight."""
        return name in self._files.weights

    def locate(self, name: str) -> tuple[TensorInfo, mmap.mmap]:
        """Return where a weight lies and the map of its file; raises `ModelError` if that has shrunk."""
        tensor = self._files.weights[name]
        if tensor.path not in self._maps:
            self._maps[tensor.path] = map_file(tensor.path)
        mapped = self._maps[tensor.path]
        if tensor.offset + tensor.num_bytes > len(mapped):
            raise ModelError(f"{tensor.path.name}: the file has shrunk since it was checked.")
        return tensor, mapped

    def count(self, name: str) -> None:
        """Report that a weight was taken in, and let go of its pages: this process needs them no more."""
        tensor, mapped = self.locate(name)
        start = tensor.offset // mmap.PAGESIZE * mmap.PAGESIZE
        mapped.madvise(mmap.MADV_DONTNEED, start, tensor.offset + tensor.num_bytes - start)
        self._num_bytes_done += tensor.num_bytes
        self._on_progress(self._num_bytes_done / self._files.info.num_bytes)
