"""What a step of a decoder costs at least, part by part: bytes that must come from memory, and operations.

Counted is what no implementation with the same number formats can leave out: every weight is read once a
step, keys and values of a sequence once a layer, and a multiplication and an addition are two operations.
Numbers that may stay in caches are free: activations, logits, and whatever a step writes. In the last layer
only tokens count whose successor is wanted, and their sequences.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from engine.kernels.cpu.suitability import FOUR_BIT_TYPES
from engine.model.check import ModelFiles

ATTENTION, HEAD = "attention", "head"
_LAYER_WEIGHTS = {
    "qkv": (("q",), ("k",), ("v",)),
    "output": (("o",),),
    "gate_up": (("gate", "up"),),
    "down": (("down",),),
}
"""Weights by part; those that are packed as one are together."""

PARTS = (*_LAYER_WEIGHTS, HEAD, ATTENTION)
"""The parts that cost something, by the names of the phases of a native step."""

_BYTES_PER_NUMBER = {"Q4_0": 18 / 32, "Q4_1": 20 / 32, "int8": 34 / 32, "bf16": 2.0, "fp32": 4.0}
_SCALE_BYTES = 4
"""Of a token and head of an int8 KV cache, for keys and for values."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes from memory, and operations."""

    num_bytes: float = 0.0
    operations: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.num_bytes + other.num_bytes, self.operations + other.operations)

    def times(self, count: int) -> "Cost":
        """Return what it costs so many times."""
        return Cost(self.num_bytes * count, self.operations * count)

    def floor_ns(self, *, gb_s: float, gops: float) -> float:
        """Return the nanoseconds that this takes at least where reading and computing overlap fully."""
        return max(self.num_bytes / gb_s, self.operations / gops)


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's tokens of a step: `num_scheduled` after `num_computed`; is their successor wanted?"""

    num_computed: int
    num_scheduled: int
    is_wanted: bool

    @property
    def end(self) -> int:
        """Tokens that the last one sees, itself among them."""
        return self.num_computed + self.num_scheduled

    @property
    def num_seen(self) -> int:
        """Pairs of a token of the step and one that it sees."""
        return self.num_scheduled * self.num_computed + self.num_scheduled * (self.num_scheduled + 1) // 2


@dataclass(frozen=True, slots=True)
class _Weight:
    """A part's weights in one layer, or the head: how many numbers, and their bytes as they are packed."""

    numbers: int
    num_bytes: float

    def times(self, num_rows: int) -> Cost:
        return Cost(self.num_bytes, 2.0 * self.numbers * num_rows) if num_rows else Cost()


class ModelCosts:
    """The costs of one model in one pair of number formats."""

    def __init__(self, files: ModelFiles, dtype: str, kv_dtype: str) -> None:
        """`dtype` and `kv_dtype`: the formats as a native model has them."""
        self._config = files.config
        scale_bytes = _SCALE_BYTES if kv_dtype == "int8" else 0
        head_bytes = files.config.head_dim * (1 if kv_dtype == "int8" else 2) + scale_bytes
        self._kv_bytes_per_token = 2 * files.config.num_kv_heads * head_bytes  # of one layer

        def weigh(prefix: str, groups: Iterable[tuple[str, ...]]) -> _Weight:
            numbers, num_bytes = 0, 0.0
            for group in groups:
                tensors = [files.weights[f"{prefix}{name}.weight"] for name in group]
                count = sum(tensor.num_elements for tensor in tensors)
                numbers += count
                num_bytes += count * _BYTES_PER_NUMBER[_kind(dtype, {tensor.dtype for tensor in tensors})]
            return _Weight(numbers, num_bytes)

        self._layers: list[Mapping[str, _Weight]] = [
            {part: weigh(f"layers.{layer}.", groups) for part, groups in _LAYER_WEIGHTS.items()}
            for layer in range(files.config.num_layers)
        ]
        self._head = weigh("", [("embed",) if files.config.tied_embeddings else ("head",)])

    @property
    def weight_bytes(self) -> float:
        """All weights that are multiplied, without padding."""
        layers = sum(weight.num_bytes for layer in self._layers for weight in layer.values())
        return layers + self._head.num_bytes

    def of_step(self, batch: list[Work]) -> dict[str, Cost]:
        """Return what each of `PARTS` costs in a step."""
        num_rows = sum(work.num_scheduled for work in batch)
        wanted = [Work(work.end - 1, 1, is_wanted=True) for work in batch if work.is_wanted]
        costs = dict.fromkeys(PARTS, Cost())
        for index, layer in enumerate(self._layers):
            is_last = index + 1 == len(self._layers)
            for part, weight in layer.items():
                costs[part] += weight.times(len(wanted) if is_last and part != "qkv" else num_rows)
        costs[ATTENTION] = self._attend(batch).times(len(self._layers) - 1) + self._attend(wanted)
        costs[HEAD] = self._head.times(len(wanted))
        return costs

    def _attend(self, batch: list[Work]) -> Cost:
        """Return the cost of one layer's attention."""
        query_size = self._config.num_heads * self._config.head_dim
        return Cost(
            float(self._kv_bytes_per_token * sum(work.end for work in batch)),
            4.0 * query_size * sum(work.num_seen for work in batch),
        )


def _kind(dtype: str, stored: set[str]) -> str:
    """Return the format that weights of these storage types are packed in."""
    if dtype != "q4":
        return dtype
    return stored.pop() if len(stored) == 1 and stored <= FOUR_BIT_TYPES else "int8"
