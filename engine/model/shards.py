"""What a model is cut into when several processes compute it together (tensor parallelism).

Megatron-LM's scheme (Shoeybi et al., 2019): queries, keys, values, gate and up are cut by their outputs,
output and down by their inputs, so that a layer needs two sums over the processes; embedding and head are cut
by the vocabulary. Shares need not be equal: whole groups of heads that share a key go to one process, and the
first processes get one more where they do not divide.
"""

from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from engine.errors import ConfigError
from engine.model.config import ModelConfig


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
                f"tensor_parallel_size is {self.size}, but the model has {config.num_kv_heads} key/value heads "
                "to share out; use a smaller one."
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


class Group(Protocol):
    """The processes that compute a model together, as one of them sees it."""

    shard: Shard

    def add_up(self, x: Tensor) -> Tensor:
        """Return the sum of all processes' x; may be x itself, changed in place."""
        ...

    def join_logits(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Return the logits (rows, vocab_size) of all shares of the vocabulary."""
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
