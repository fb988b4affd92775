"""Where a tensor lies in a model file and how its numbers are stored (no torch here)."""

import itertools
import math
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ModelError

QUANT_GEOMETRY: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "F64": (1, 8),
    "I8": (1, 1),
    "I16": (1, 2),
    "I32": (1, 4),
    "I64": (1, 8),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q8_1": (32, 40),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "Q8_K": (256, 292),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ2_S": (256, 82),
    "IQ3_XXS": (256, 98),
    "IQ3_S": (256, 110),
    "IQ1_S": (256, 50),
    "IQ1_M": (256, 56),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
    "MXFP4": (32, 17),
}
"""Numbers per block and bytes per block of each storage type (ggml's names)."""

NOT_LOADABLE = frozenset({"F64", "I8", "I16", "I32", "I64", "Q8_1", "Q8_K"})
"""Types that no weight is stored in: integers, and what ggml keeps for its own intermediate results."""

_SHOWN_CHARS = 80


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor inside a file; all bounds were checked against the file by the reader.

    `shape` is in torch's order (rows first). Numbers lie row by row in [offset, offset + num_bytes).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    path: Path
    offset: int
    num_bytes: int

    @property
    def num_elements(self) -> int:
        """Numbers in the tensor."""
        return math.prod(self.shape)


def check_no_overlap(tensors: list[TensorInfo]) -> None:
    """Raise `ModelError` if two tensors of one file share bytes."""
    ordered = sorted(tensors, key=lambda tensor: tensor.offset)
    for before, after in itertools.pairwise(ordered):
        if before.offset + before.num_bytes > after.offset:
            raise ModelError(
                f"{before.path.name}: tensors {show(before.name)} and {show(after.name)} overlap; "
                "the file is damaged."
            )


def show(text: str) -> str:
    """Return untrusted text as one short printable line in quotes."""
    return ascii(text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "...")
