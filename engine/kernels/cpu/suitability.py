"""What the kernels can do with a model, answered from its headers alone. No numpy."""

from engine.model.check import ModelFiles
from engine.model.config import ModelConfig

FOUR_BIT_TYPES = frozenset({"Q4_0", "Q4_1"})
"""Storage types that the kernels multiply exactly as they are stored."""

MAX_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 16

_BYTES_PER_NUMBER = {"int8": 34 / 32, "bf16": 2.0, "fp32": 4.0}
_FOUR_BIT_BYTES_PER_NUMBER = 20 / 32


def find_obstacle(config: ModelConfig) -> str | None:
    """Return why the kernels cannot run a model, None if they can."""
    if config.head_dim % HEAD_DIM_MULTIPLE or config.head_dim > MAX_HEAD_DIM:
        return (
            f"the native kernels need heads of a multiple of {HEAD_DIM_MULTIPLE} up to {MAX_HEAD_DIM} "
            f"numbers, and this model's have {config.head_dim}"
        )
    return None


def has_four_bit_weights(files: ModelFiles) -> bool:
    """Whether any weight is stored in four bits that can be kept as they are."""
    return _count_four_bit(files) > 0


def is_mostly_four_bit(files: ModelFiles) -> bool:
    """Whether most numbers are stored in four bits that can be kept as they are."""
    return 2 * _count_four_bit(files) > files.info.num_parameters


def packed_bytes(files: ModelFiles, dtype: str) -> int:
    """Return about how much memory the packed weights take."""
    total = 0.0
    for tensor in files.weights.values():
        if dtype == "q4" and tensor.dtype in FOUR_BIT_TYPES:
            total += tensor.num_elements * _FOUR_BIT_BYTES_PER_NUMBER
        else:
            total += tensor.num_elements * _BYTES_PER_NUMBER["int8" if dtype == "q4" else dtype]
    return int(total)


def _count_four_bit(files: ModelFiles) -> int:
    return sum(tensor.num_elements for tensor in files.weights.values() if tensor.dtype in FOUR_BIT_TYPES)
