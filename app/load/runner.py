"""Sending a workload: each job at its time, never more at once than allowed."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable

from app.load.client import Outcome
from app.load.stats import LoadStats
from app.load.workload import Body, Job, Workload

Send = Callable[[str, Body, Callable[[], None]], Awaitable[Outcome]]
Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[None]]
OnProgress = Callable[[LoadStats, float], None]
"""Called with the counts and the present rate in tokens per second."""

_TICK_S = 0.1
_RATE_WINDOW_TICKS = 10


class LoadRun:
    """One run of a workload against one server."""

    def __init__(
        self,
        workload: Workload,
        send: Send,
        *,
        concurrency: int,
        clock: Clock = time.monotonic,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        """Prepare to run at most `concurrency` jobs at once."""
        self.stats = LoadStats(
            num_planned=workload.num_requests + workload.num_skipped, num_skipped=workload.num_skipped
        )
        self._workload = workload
        self._send = send
        self._slots = asyncio.Semaphore(concurrency)
        self._clock = clock
        self._sleep = sleep

    async def run(self) -> LoadStats:
        """Send everything and return the counts; being cancelled ends the run early, with its counts."""
        started = self._clock()
        tasks: set[asyncio.Task[None]] = set()
        try:
            for job in self._workload.jobs:
                await self._slots.acquire()
                delay_s = job.arrival_s - (self._clock() - started)
                if delay_s > 0:
                    await self._sleep(delay_s)
                task = asyncio.create_task(self._run_job(job))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            while tasks:
                await asyncio.wait(tasks)
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self.stats.elapsed_s = self._clock() - started
        return self.stats

    async def _run_job(self, job: Job) -> None:
        answers: list[str] = []
        try:
            while len(answers) < job.num_requests:
                outcome = await self._run_request(job, answers)
                if outcome.error is not None:
                    self._count_rest(outcome, job.num_requests - len(answers) - 1)
                    return
                answers.append(outcome.text)
        finally:
            self._slots.release()

    async def _run_request(self, job: Job, answers: list[str]) -> Outcome:
        stats = self.stats
        stats.num_running += 1
        try:
            outcome = await self._send(job.path, job.make_body(answers), self._count_piece)
        except asyncio.CancelledError:
            stats.num_cut_off += 1
            raise
        finally:
            stats.num_running -= 1
        stats.add(outcome, job.priority)
        return outcome

    def _count_piece(self) -> None:
        self.stats.num_pieces += 1

    def _count_rest(self, outcome: Outcome, num_requests: int) -> None:
        """A turn that failed takes the later turns of its conversation with it."""
        if not num_requests:
            return
        if outcome.is_over_context:
            self.stats.num_skipped += num_requests
        else:
            self.stats.errors["turn before it failed"] += num_requests


async def report_progress(stats: LoadStats, on_progress: OnProgress, sleep: Sleep = asyncio.sleep) -> None:
    """Call `on_progress` ten times a second until cancelled, with the rate over the last second."""
    history = deque([(time.monotonic(), stats.num_pieces)], maxlen=_RATE_WINDOW_TICKS + 1)
    while True:
        await sleep(_TICK_S)
        history.append((time.monotonic(), stats.num_pieces))
        (first_s, first_pieces), (last_s, last_pieces) = history[0], history[-1]
        on_progress(stats, (last_pieces - first_pieces) / max(last_s - first_s, _TICK_S))
