"""What the engine core needs of a model: one call a step."""

from collections.abc import Callable
from typing import Protocol

import msgspec

from engine.scheduling.output import SchedulerOutput


class ModelRunnerOutput(msgspec.Struct, frozen=True, gc=False):
    """Result of one step.

    `token_ids[i]` belongs to `scheduler_output.scheduled[i]`; -1 where nothing was sampled, `FAILED_TOKEN_ID`
    where nothing could be, or where the chunk could not be computed at all. `finished_loads`: loads that have
    ended since the last step. Durations are in nanoseconds.
    """

    token_ids: list[int]
    forward_ns: int
    sample_ns: int
    finished_loads: list[int] = []


class ModelRunner(Protocol):
    """Computes a step. Owns the weights, the KV tensors and the host tier's memory; decides nothing."""

    vocab_size: int
    eos_token_ids: frozenset[int]

    @property
    def loss(self) -> str | None:
        """What it has lost and cannot compute without until `recover`, also between steps; None: nothing."""
        ...

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute all scheduled tokens, write their KV, sample where `needs_sampling`.

        Copies between pool and host tier as `SchedulerOutput` says.
        """
        ...

    def reset(self) -> None:
        """Forget all KV (after a failed step), once no copy is under way any more."""
        ...

    def recover(self, on_wait: Callable[[], None]) -> None:
        """Get back what was lost, if anything was, which may take as long as loading does.

        Calls `on_wait` meanwhile; what that raises ends it, and what was lost stays lost.
        """
        ...

    def close(self) -> None:
        """End whatever runs beside the calling thread; no step can be computed afterwards. Safe to repeat."""
        ...


class LocalRunner:
    """What all runners have in common that need nothing beside their own process."""

    @property
    def loss(self) -> str | None:
        """Nothing can be lost."""
        return None

    def recover(self, on_wait: Callable[[], None]) -> None:
        """Nothing is to be had back."""

    def close(self) -> None:
        """Leave the end to the process: copies that are under way are ended there."""
