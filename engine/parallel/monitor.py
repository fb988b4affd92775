"""Watches the other ranks from rank 0, in a thread of its own, and ends all of them when one is lost.

A sum over the ranks waits for all of them, inside of torch, and a rank that is gone or frozen would keep it
waiting. What ends such a wait is the end of the others: the system closes their connections then, and the sum
fails on the ranks that are left.
"""

import logging
import selectors
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import RankError
from engine.parallel.messages import Stage
from engine.parallel.process import RankProcess

logger = logging.getLogger(__name__)

TICK_S = 0.25
"""How often clocks are looked at; the end of a process is noticed at once."""

_ORDER = (Stage.STARTING, Stage.LOADING, Stage.LOADED, Stage.READY)

_LATE_S = 1.0
"""If a tick took so much longer, this process did not run: no time for others to be silent in."""


@dataclass(frozen=True, slots=True)
class Limits:
    """After what time a rank counts as lost, in seconds.

    `beat_s`: between two signs of life of a rank. `silence_s`: without one, once it is ready. `step_s`: in
    one step; less than what makes a server count as stuck (`HEARTBEAT_LIMIT_S` of app/engine_host.py).
    `load_s`: without any progress while it starts and loads, and for steps that may compile.
    """

    beat_s: float = 1.0
    silence_s: float = 5.0
    step_s: float = 20.0
    load_s: float = 120.0


class Monitor(threading.Thread):
    """Ends with `close`, or with the first loss. `loss` says what was lost, None as long as nothing is."""

    def __init__(self, ranks: list[RankProcess], limits: Limits, on_loss: Callable[[], None]) -> None:
        """Watch nothing before `start`. `on_loss` is called once all ranks were ended, in any thread."""
        super().__init__(name="rank-monitor", daemon=True)
        self.loss: str | None = None
        self._ranks = ranks
        self._limits = limits
        self._on_loss = on_loss
        self._size = len(ranks) + 1
        self._changed = threading.Condition()
        self._is_closed = False
        self._step_since_s: float | None = None
        self._step_limit_s = limits.step_s
        self._ticked_s = time.monotonic()

    # ------------------------------------------------------------------ called by the thread that computes

    def begin_step(self, limit_s: float) -> None:
        """Start the clock of a step."""
        with self._changed:
            self._step_limit_s = limit_s
            self._step_since_s = time.monotonic()

    def end_step(self) -> None:
        """Stop the clock of a step."""
        with self._changed:
            self._step_since_s = None

    def wait_for_stage(self, stage: Stage, on_wait: Callable[[], None]) -> None:
        """Return when all ranks have come so far; calls `on_wait` meanwhile, which may raise.

        Raises `RankError` if one is lost.
        """
        due = _ORDER.index(stage)

        def is_over() -> bool:
            return self.loss is not None or all(rank.stage in _ORDER[due:] for rank in self._ranks)

        while True:
            with self._changed:
                if self._changed.wait_for(is_over, TICK_S):
                    break
            on_wait()
        if self.loss is not None:
            raise RankError(self.loss)

    def wait_for_loss(self, timeout_s: float) -> str | None:
        """Return the loss that is behind an error, which may be noticed a little later than the error."""
        with self._changed:
            self._changed.wait_for(lambda: self.loss is not None, timeout_s)
        return self.loss

    def lose(self, reason: str) -> None:
        """End all ranks: they are not in step any more, or one is lost. Only the first reason counts."""
        with self._changed:
            if self.loss is not None or self._is_closed:
                return
            self.loss = reason
            for rank in self._ranks:
                rank.kill()
            self._changed.notify_all()
        logger.error("%s All ranks are ended.", reason)
        self._on_loss()

    def close(self) -> None:
        """Stop watching, and end all ranks. Returns when the thread has ended."""
        with self._changed:
            self._is_closed = True
        for rank in self._ranks:
            rank.kill()
        if self.is_alive() and threading.current_thread() is not self:  # which may collect garbage
            self.join()

    # ------------------------------------------------------------------ the thread

    def run(self) -> None:
        """Watch. If that fails, nobody would notice a loss any more, so it is one."""
        try:
            self._watch()
        except Exception:
            logger.exception("Watching the ranks failed")
            self.lose("The ranks cannot be watched any more.")

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                selector.register(rank.reports, selectors.EVENT_READ, rank)
            self._ticked_s = time.monotonic()
            while not self._is_closed and self.loss is None:
                for key, _ in selector.select(TICK_S):
                    self._hear(key.data)
                self._look_at_clocks()

    def _hear(self, rank: RankProcess) -> None:
        is_there = rank.read_reports()
        if not is_there or rank.stage is Stage.FAILED:
            why = rank.message or f"{rank.describe_end()}."
            self.lose(f"Rank {rank.rank} of {self._size} failed: {why}")
        with self._changed:
            self._changed.notify_all()

    def _look_at_clocks(self) -> None:
        now = time.monotonic()
        lost_s, self._ticked_s = now - self._ticked_s - TICK_S, now
        if lost_s > _LATE_S:
            self._forgive(lost_s)
            return
        for rank in self._ranks:
            limit_s = self._limits.silence_s if rank.stage is Stage.READY else self._limits.load_s
            if now - rank.heard_s > limit_s:
                self.lose(
                    f"Rank {rank.rank} of {self._size} failed: it is {rank.stage}, and there was no sign of "
                    f"life for {limit_s:g} s."
                )
        with self._changed:
            since_s, limit_s = self._step_since_s, self._step_limit_s
        if since_s is not None and now - since_s > limit_s:
            self.lose(f"A step of {self._size} ranks has not ended within {limit_s:g} s.")

    def _forgive(self, lost_s: float) -> None:
        """Add time in which this process did not run, and so perhaps no other, to all clocks."""
        for rank in self._ranks:
            rank.heard_s += lost_s
        with self._changed:
            if self._step_since_s is not None:
                self._step_since_s += lost_s
