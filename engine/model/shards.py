"""What a model is cut into when several processes compute it together (tensor parallelism).

Megatron-LM's scheme (Shoeybi et al., 2019): queries, keys, values, gate and up are cut by their outputs,
output and down by their inputs, so that a layer needs two sums over the processes; embedding and head are cut
by the vocabulary. Shares need not be equal: whole groups of heads that share a key go to one process, and the
first processes get one more where they do not divide.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from torch import Tensor
from torch.nn import functional

from engine.errors import ConfigError
from engine.model.config import ModelConfig


class Cut(NamedTuple):
    """The part [start, stop) of dimension `dim` of a tensor."""

    dim: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `size` shares of a model, number `rank`."""

    rank: int = 0
    size: int = 1

    def cut(self, count: int) -> slice:
        """Return this share of `count` things that lie side by side."""
        each, rest = divmod(count, self.size)
        start = self.rank * each + min(self.rank, rest)
        return slice(start, start + each + (self.rank < rest))

    def config(self, config: ModelConfig) -> ModelConfig:
        """Return the sizes of this share; raises `ConfigError` if there are too few heads to share."""
        if self.size > config.num_kv_heads:
            raise ConfigError(
                f"tensor_parallel_size is {self.size}, but the model has {config.num_kv_heads} key/value "
                "heads to share out; use a smaller one."
            )
        heads = self.cut(config.num_kv_heads)
        num_kv_heads = heads.stop - heads.start
        columns = self.cut(config.intermediate_size)
        return replace(
            config,
            num_kv_heads=num_kv_heads,
            num_heads=num_kv_heads * (config.num_heads // config.num_kv_heads),
            intermediate_size=columns.stop - columns.start,
        )

    def cut_weight(self, name: str, config: ModelConfig) -> Cut | None:
        """Return what this share has of a weight ("layers.0.q.weight", ...); None: all of it.

        `config` is that of the whole model. The bias of a layer that is cut by its inputs is not cut either,
        but must be added by one process only.
        """
        if self.size == 1:
            return None
        part, kind = name.split(".")[-2:]
        heads = self.cut(config.num_kv_heads)
        group_size = (
            config.num_heads // config.num_kv_heads * config.head_dim
        )  # queries of one key/value head
        match part:
            case "embed" | "head":
                return _cut(0, self.cut(config.vocab_size))
            case "q":
                return _cut(0, heads, group_size)
            case "k" | "v":
                return _cut(0, heads, config.head_dim)
            case "gate" | "up":
                return _cut(0, self.cut(config.intermediate_size))
            case "o" if kind == "weight":
                return _cut(1, heads, group_size)
            case "down":
                return _cut(1, self.cut(config.intermediate_size))
        return None


def _cut(dim: int, part: slice, width: int = 1) -> Cut:
    """Return the cut of things that are `width` rows or columns each."""
    return Cut(dim, part.start * width, part.stop * width)


class Group(Protocol):
    """The processes that compute a model together, as one of them sees it."""

    shard: Shard

    def add_up(self, x: Tensor) -> Tensor:
        """Return the sum of all processes' x; may be x itself, changed in place."""
        ...

    def join_logits(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Return the logits (rows, vocab_size) of all shares of the vocabulary.

        To process 0 only, which chooses the tokens; the others may get their own share back.
        """
        ...


class Alone:
    """A `Group` of one."""

    shard = Shard()

    def add_up(self, x: Tensor) -> Tensor:
        """Return x."""
        return x

    def join_logits(self, logits: Tensor, vocab_size: int) -> Tensor:  # noqa: ARG002 - the interface has it
        """Return the logits."""
        return logits


class Unsummed:
    """A `Group` of which only one computes: its results are wrong, and take as much memory as right ones."""

    def __init__(self, shard: Shard) -> None:
        """Compute the share `shard`."""
        self.shard = shard

    def add_up(self, x: Tensor) -> Tensor:
        """Return x."""
        return x

    def join_logits(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Return logits (rows, vocab_size), zeros in the place of the other shares."""
        return functional.pad(logits, (0, vocab_size - logits.shape[-1]))  # (rows, vocab_size)
