"""Runs a model on several processes that compute each step together (tensor parallelism).

```python
team = Team(TeamSpec(...))
team.start()  # the other ranks load beside this one
weights = load_weights(..., shard=team.group.shard)
team.wait_until_loaded(on_wait)
runner = TensorParallelRunner(team, config, weights, pool, eos_token_ids)
```
"""

import weakref
from collections.abc import Callable

from engine.errors import EngineInvariantError
from engine.model.config import ModelConfig
from engine.model.decoder import DecoderWeights
from engine.parallel.decoder import LeadingDecoder
from engine.parallel.team import PoolSize, Team
from engine.runner.arithmetic import make_arithmetic
from engine.runner.base import ModelRunnerOutput
from engine.runner.torch_runner import TorchRunner
from engine.runner.warm_up import warm_up
from engine.scheduling.output import SchedulerOutput


class TensorParallelRunner:
    """A `ModelRunner` that is rank 0 of a team, and its owner. Owned by one thread."""

    def __init__(
        self,
        team: Team,
        config: ModelConfig,
        weights: DecoderWeights,
        pool: PoolSize,
        eos_token_ids: frozenset[int],
    ) -> None:
        """Connect the ranks, all of which have loaded, and have each allocate its part of the KV pool.

        `config` is that of the whole model, `weights` are rank 0's share. Raises `RankError`, and
        `RuntimeError` (torch's) when memory does not suffice; the team is closed then.
        """
        self._team = team
        weakref.finalize(self, team.close)
        self._max_warm_up_tokens = min(pool.block_size, pool.num_positions)
        try:
            dtype, device = weights.embedding.dtype, weights.embedding.device
            arithmetic = make_arithmetic(team.spec.attention, config, dtype, device, team.group)
            decoder = LeadingDecoder(config, weights, pool.num_positions, arithmetic, team.tell)
            self._inner = TorchRunner(
                decoder,
                num_blocks=pool.num_blocks,
                block_size=pool.block_size,
                eos_token_ids=eos_token_ids,
            )
            team.connect(pool)
        except BaseException:
            team.close()
            raise
        self.vocab_size = self._inner.vocab_size
        self.eos_token_ids = eos_token_ids
        self._limit_s = team.spec.limits.step_s

    @property
    def loss(self) -> str | None:
        """Why it cannot compute before `recover`: a rank is gone, or they are out of step."""
        return self._team.loss

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute all scheduled tokens on all ranks, sample where `needs_sampling`.

        Raises `RankError` if a rank is lost; whatever it raises, only `recover` helps then.
        """
        if not scheduler_output.scheduled:
            return self._inner.execute(scheduler_output)
        with self._team.step(self._limit_s):
            return self._inner.execute(scheduler_output)

    def warm_up(self) -> None:
        """Compute a few tokens, so that the first request finds all ready.

        May take long, since kernels may have to be compiled. Raises `RankError`; all ranks are ended then.
        """
        self._limit_s = self._team.spec.limits.load_s
        try:
            warm_up(self, self._max_warm_up_tokens)
        except BaseException:
            self._team.close()
            raise
        finally:
            self._limit_s = self._team.spec.limits.step_s

    def measure_block_ns(self) -> float:
        """Raise: there is no host tier, whose copies would have to be made on all ranks."""
        raise EngineInvariantError("several ranks have no host tier")

    def reset(self) -> None:
        """Forget all KV."""
        self._inner.reset()

    def recover(self, on_wait: Callable[[], None]) -> None:
        """Start all other ranks over if one is lost, which takes as long as loading does.

        Calls `on_wait` while they load, which may raise. Raises `RankError` if it fails; none is left
        then.
        """
        if self._team.loss is not None:
            self._team.restart(on_wait)
            self.warm_up()

    def close(self) -> None:
        """End all other ranks; when this returns, nothing of them is left."""
        self._team.close()
