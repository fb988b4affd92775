"""A quick look at a model before anything heavy is imported: is it there, whole and of a known kind?"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ModelError
from engine.model.config import ModelConfig, config_from_gguf, config_from_hf
from engine.model.gguf import GGUFFile, read_gguf
from engine.model.safetensors_folder import CONFIG_FILE, GENERATION_CONFIG_FILE, read_json, read_tensors
from engine.model.tensor_info import TensorInfo
from engine.model.tensor_names import match_tensors


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is known of a model without loading it.

    `storage` is the storage type of most weights ("Q4_1", "BF16", ...). `num_bytes` counts the
    weights in the file, `num_parameters` the numbers in them.
    """

    path: Path
    name: str
    file_format: str
    architecture: str
    storage: str
    num_parameters: int
    num_bytes: int
    num_layers: int
    vocab_size: int
    max_position: int


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's checked headers: `weights` maps weight names to places in files."""

    info: ModelInfo
    config: ModelConfig
    weights: dict[str, TensorInfo]
    gguf: GGUFFile | None

    @property
    def path(self) -> Path:
        """The GGUF file or the model folder."""
        return self.info.path


def open_model(path: Path) -> ModelFiles:
    """Read and check all headers of a model: a GGUF file or a Hugging Face folder.

    Takes milliseconds and reads no weights. Raises `ModelError` with a one-line message: no such file,
    damaged, of an unknown architecture, or with missing or unknown tensors.
    """
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot look at it ({error}).") from None
    if is_folder:
        return _open_folder(path)
    if not is_file:
        raise ModelError(f"{path}: no such model file or folder.")
    gguf = read_gguf(path)
    config = config_from_gguf(gguf)
    weights = match_tensors(config, gguf.tensors, is_gguf=True)
    return ModelFiles(_info(path, "gguf", config, weights), config, weights, gguf)


def _open_folder(folder: Path) -> ModelFiles:
    if not (folder / CONFIG_FILE).is_file():
        raise ModelError(f"{folder}: no {CONFIG_FILE} in the model folder.")
    generation = folder / GENERATION_CONFIG_FILE
    config = config_from_hf(
        read_json(folder / CONFIG_FILE), read_json(generation) if generation.is_file() else {}
    )
    weights = match_tensors(config, read_tensors(folder), is_gguf=False)
    return ModelFiles(_info(folder, "safetensors", config, weights), config, weights, None)


def _info(path: Path, file_format: str, config: ModelConfig, weights: dict[str, TensorInfo]) -> ModelInfo:
    numbers_by_type: Counter[str] = Counter()
    for tensor in weights.values():
        numbers_by_type[tensor.dtype] += tensor.num_elements
    return ModelInfo(
        path=path,
        name=path.stem if file_format == "gguf" else path.resolve().name,
        file_format=file_format,
        architecture=config.architecture,
        storage=numbers_by_type.most_common(1)[0][0],
        num_parameters=sum(numbers_by_type.values()),
        num_bytes=sum(tensor.num_bytes for tensor in weights.values()),
        num_layers=config.num_layers,
        vocab_size=config.vocab_size,
        max_position=config.max_position,
    )
