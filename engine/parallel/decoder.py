"""Rank 0's decoder, from which the other ranks get their steps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from engine.errors import RankError
from engine.model.attention import KVCache
from engine.model.config import ModelConfig
from engine.model.decoder import Arithmetic, Decoder, DecoderWeights
from engine.model.step import ForwardBatch, StepInputs


class LeadingDecoder(Decoder):
    """Tells the other ranks of each step before it computes its own share."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        num_positions: int,
        arithmetic: Arithmetic,
        tell: Callable[[StepInputs], None],
    ) -> None:
        """Do as `Decoder` does; `tell` hands a step to the others."""
        super().__init__(config, weights, num_positions, arithmetic)
        self._tell = tell

    def make_batch(self, inputs: StepInputs) -> ForwardBatch:
        """Tell the others, and return the step on the device. Raises `RankError`, see `forward`."""
        self._tell(inputs)
        with _told():
            return super().make_batch(inputs)

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Do as `Decoder` does, but raise `RankError` instead of torch's and Python's errors.

        After one of memory a runner would compute the step again in parts, but the other ranks are in the
        midst of this one.
        """
        with _told():
            return super().forward(batch, cache)


@contextmanager
def _told() -> Iterator[None]:
    """Around what the other ranks compute, too."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        first_line = (str(error) or "no memory").splitlines()[0]
        raise RankError(f"Rank 0 failed: {type(error).__name__}: {first_line}") from error
