import asyncio
from collections.abc import Callable, Sequence

from app.load.client import Outcome
from app.load.runner import LoadRun, report_progress
from app.load.stats import LoadStats
from app.load.workload import Body, Job, Workload


class VirtualTime:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(0)  # what is due now comes first
        self.now_s += delay_s


class Server:
    """Stands in for the client: answers with what was prepared, or after `release`."""

    def __init__(self, *outcomes: Outcome, blocks: bool = False, time: VirtualTime | None = None) -> None:
        self.outcomes = list(outcomes)
        self.sent: list[tuple[str, Body, float]] = []
        self.num_open = self.max_open = 0
        self.release = asyncio.Event()
        self._blocks = blocks
        self._time = time or VirtualTime()

    async def send(self, path: str, body: Body, on_piece: Callable[[], None]) -> Outcome:
        self.sent.append((path, body, self._time.now_s))
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            await asyncio.sleep(0)
            if self._blocks:
                await self.release.wait()
        finally:
            self.num_open -= 1
        on_piece()
        return self.outcomes.pop(0) if self.outcomes else Outcome(text="ok", num_output_tokens=1)


def make_job(arrival_s: float = 0.0, num_requests: int = 1) -> Job:
    def make_body(answers: Sequence[str]) -> Body:
        return {"answers": list(answers)}

    return Job(arrival_s, "/path", num_requests, make_body)


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


async def test_jobs_are_sent_at_their_times() -> None:
    time = VirtualTime()
    server = Server(time=time)
    jobs = [make_job(arrival_s) for arrival_s in (0.0, 1.5, 1.5, 4.0)]

    stats = await LoadRun(
        Workload(jobs, num_skipped=3), server.send, concurrency=9, clock=time.clock, sleep=time.sleep
    ).run()

    assert [round(sent_s - 100, 6) for _, _, sent_s in server.sent] == [0.0, 1.5, 1.5, 4.0]
    assert (stats.num_finished, stats.num_skipped, stats.num_planned) == (4, 3, 7)
    assert (stats.num_failed, stats.num_running, stats.num_not_sent) == (0, 0, 0)


async def test_no_more_jobs_run_at_once_than_allowed() -> None:
    server = Server()

    stats = await LoadRun(Workload([make_job() for _ in range(20)]), server.send, concurrency=3).run()

    assert stats.num_finished == 20
    assert server.max_open == 3


async def test_turns_follow_each_other_with_the_answers_before_them() -> None:
    server = Server(Outcome(text="one"), Outcome(text="two"))

    stats = await LoadRun(Workload([make_job(num_requests=2)]), server.send, concurrency=1).run()

    assert [body["answers"] for _, body, _ in server.sent] == [[], ["one"]]
    assert stats.num_finished == 2


async def test_failed_turn_ends_its_conversation_and_is_counted() -> None:
    server = Server(Outcome(error="503 busy"))

    stats = await LoadRun(Workload([make_job(num_requests=3)]), server.send, concurrency=1).run()

    assert len(server.sent) == 1
    assert stats.errors == {"503 busy": 1, "turn before it failed": 2}
    assert stats.num_not_sent == 0


async def test_turn_over_the_context_counts_as_skipped() -> None:
    server = Server(Outcome(text="one"), Outcome(error="400 context_length_exceeded", is_over_context=True))

    stats = await LoadRun(Workload([make_job(num_requests=3)]), server.send, concurrency=1).run()

    assert (stats.num_finished, stats.num_skipped, stats.num_failed) == (1, 2, 0)


async def test_cancelled_run_ends_with_its_counts() -> None:
    server = Server(blocks=True)
    run = LoadRun(Workload([make_job() for _ in range(5)]), server.send, concurrency=2)
    task = asyncio.create_task(run.run())
    await wait_until(lambda: server.num_open == 2)

    task.cancel()
    stats = await task

    assert (stats.num_cut_off, stats.num_not_sent, stats.num_running) == (2, 3, 0)
    assert server.num_open == 0


async def test_progress_is_reported_with_the_present_rate() -> None:
    stats = LoadStats(num_planned=1)
    reports: list[float] = []

    async def sleep(delay_s: float) -> None:
        stats.num_pieces += 10
        await asyncio.sleep(0)

    task = asyncio.create_task(report_progress(stats, lambda _, rate: reports.append(rate), sleep))
    await wait_until(lambda: len(reports) > 3)
    task.cancel()

    assert all(rate > 0 for rate in reports)
