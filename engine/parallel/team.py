"""The ranks of one model as rank 0 sees them: started, connected, given steps, started over, ended."""

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from engine.errors import RankError
from engine.model.shards import Shard
from engine.model.step import StepInputs
from engine.parallel.group import RankGroup
from engine.parallel.messages import PoolSpec, RankSpec, Stage, pack_inputs
from engine.parallel.monitor import Limits, Monitor
from engine.parallel.process import RankProcess

logger = logging.getLogger(__name__)

NCCL = "nccl"
GLOO = "gloo"

_REASON_S = 1.0
"""How long a failed step waits for the monitor to find out why."""


@dataclass(frozen=True, kw_only=True)
class TeamSpec:
    """What all ranks load, and with what they compute.

    `devices` has torch's name for the device of each rank, rank 0 first, and so counts them; `num_threads`
    are those of each on the CPU (0: torch's own number). The other fields are those of `RankSpec`.
    """

    model_path: Path
    fingerprint: str
    devices: list[str]
    dtype: str
    attention: str
    num_threads: int = 0
    backend: str = GLOO
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The KV pool of each rank, and the positions that a sequence can have."""

    num_blocks: int
    block_size: int
    num_positions: int


class Team:
    """Rank 0's side of all other ranks. Owned by the thread that computes.

    `start`, `wait_until_loaded`, `connect`, then steps. Whoever has called `start` must call `close`.
    """

    def __init__(self, spec: TeamSpec) -> None:
        """Start nothing yet."""
        self.spec = spec
        self.group = RankGroup(Shard(0, len(spec.devices)))
        self._pool: PoolSize | None = None
        self._ranks: list[RankProcess] = []
        self._monitor: Monitor | None = None
        self._folder: Path | None = None
        self._is_connected = False

    @property
    def loss(self) -> str | None:
        """What was lost since the ranks were connected, None if nothing was; they cannot compute then."""
        if not self._is_connected or self._monitor is None:
            return "The ranks are not connected."
        return self._monitor.loss

    def start(self) -> None:
        """Start the processes, which load beside this one. Raises `RankError` if that cannot be done."""
        logger.info("Starting %d more ranks", len(self.spec.devices) - 1)
        try:
            for rank in range(1, len(self.spec.devices)):
                self._ranks.append(RankProcess(rank))
                self._ranks[-1].send(msgspec.json.encode(self._make_rank_spec(rank)))
        except OSError as error:
            self.close()
            raise RankError(f"Another rank cannot be started ({error}).") from error
        self._monitor = Monitor(self._ranks, self.spec.limits, self.group.abort)
        self._monitor.start()

    def _make_rank_spec(self, rank: int) -> RankSpec:
        spec = self.spec
        return RankSpec(
            rank=rank,
            size=len(spec.devices),
            model_path=str(spec.model_path),
            fingerprint=spec.fingerprint,
            device=spec.devices[rank],
            dtype=spec.dtype,
            backend=spec.backend,
            attention=spec.attention,
            num_threads=spec.num_threads,
            beat_s=spec.limits.beat_s,
            log_level=logger.getEffectiveLevel(),
        )

    def wait_until_loaded(self, on_wait: Callable[[], None]) -> None:
        """Return when all ranks have their weights; calls `on_wait` meanwhile. Raises `RankError`."""
        self._watch().wait_for_stage(Stage.LOADED, on_wait)

    def connect(self, pool: PoolSize) -> None:
        """Have all ranks make their pool, then connect. Raises `RankError`."""
        self._pool = pool
        # Readable to nobody else: whoever reads it learns where the ranks listen.
        self._folder = Path(tempfile.mkdtemp(prefix="pageglass-ranks-"))
        store_path = self._folder / "store"
        frame = PoolSpec(
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
            num_positions=pool.num_positions,
            store_path=str(store_path),
        )
        with self._timed(self.spec.limits.load_s):
            self._send(msgspec.json.encode(frame))
            self._watch().wait_for_stage(Stage.READY, _wait)
            self.group.connect(store_path, self.spec.backend)
        if self.spec.backend != NCCL:  # whose watchdog looks into it
            self._remove_folder()
        self._is_connected = True

    def tell(self, inputs: StepInputs) -> None:
        """Give all ranks a step to compute; they begin at once."""
        self._send(pack_inputs(inputs))

    def _send(self, payload: bytes | memoryview) -> None:
        for rank in self._ranks:
            rank.send(payload)

    @contextmanager
    def step(self, limit_s: float) -> Iterator[None]:
        """Around all of a step. Raises `RankError` if a rank is lost, or was before.

        After any error in it the ranks are not in step with each other any more, and all are ended.
        """
        if self.loss is not None:
            raise RankError(self.loss)
        with self._timed(limit_s):
            yield
        if self.loss is not None:  # a GPU's sums end without an error when they are aborted
            raise RankError(self.loss)

    @contextmanager
    def _timed(self, limit_s: float) -> Iterator[None]:
        """Around what all ranks do together; the error of a sum without a peer becomes what is behind it."""
        monitor = self._watch()
        monitor.begin_step(limit_s)
        try:
            yield
        except BaseException as error:
            loss = monitor.wait_for_loss(_REASON_S)
            if loss is None:
                is_explained = isinstance(error, RankError)
                monitor.lose(str(error) if is_explained else f"Rank 0 failed ({type(error).__name__}).")
                raise
            raise RankError(loss) from error
        finally:
            monitor.end_step()

    def restart(self, on_wait: Callable[[], None]) -> None:
        """End whatever is left and start again, with the same pool; calls `on_wait` while the ranks load.

        Raises `RankError`, and what `on_wait` raises; no rank is left then.
        """
        assert self._pool is not None, "never connected"
        self.close()
        try:
            self.start()
            self.wait_until_loaded(on_wait)
            self.connect(self._pool)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all ranks; when this returns, nothing of them is left. Safe to repeat."""
        self._is_connected = False
        if self._monitor is not None:
            self._monitor.close()
        for rank in self._ranks:
            rank.close()
        self._ranks.clear()
        self._monitor = None
        self.group.disconnect()
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            with suppress(OSError):
                shutil.rmtree(self._folder)
            self._folder = None

    def _watch(self) -> Monitor:
        assert self._monitor is not None, "not started"
        return self._monitor


def _wait() -> None:
    """Nothing to do meanwhile."""
