"""What the engine core needs of a model: one call a step."""

from typing import Protocol

import msgspec

from engine.scheduling.output import SchedulerOutput


class ModelRunnerOutput(msgspec.Struct, frozen=True, gc=False):
    """Result of one step.

    `token_ids[i]` belongs to `scheduler_output.scheduled[i]`; -1 where nothing was sampled,
    `FAILED_TOKEN_ID` where nothing could be. `finished_loads`: loads that have ended since the last step.
    Durations are in nanoseconds.
    """

    token_ids: list[int]
    forward_ns: int
    sample_ns: int
    finished_loads: list[int] = []


class ModelRunner(Protocol):
    """Computes a step. Owns the weights, the KV tensors and the host tier's memory; decides nothing."""

    vocab_size: int
    eos_token_ids: frozenset[int]

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute all scheduled tokens, write their KV, sample where `needs_sampling`.

        Copies between pool and host tier as `SchedulerOutput` says.
        """
        ...

    def reset(self) -> None:
        """Forget all KV (after a failed step), once no copy is under way any more."""
        ...
