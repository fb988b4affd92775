"""Calls off the event loop: their limits, their deadlines, and what is left of a stuck one."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from app.services.workers import DeadlineError, Workers, WorkersLostError
from engine.errors import QueueFullError
from tests.support.api import until


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


async def test_a_call_gives_its_result_or_its_error() -> None:
    workers = Workers("test", num_workers=2, max_waiting=2)
    assert await workers.run(lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        await workers.run(lambda: 1 / 0)
    name = await workers.run(lambda: threading.current_thread().name)
    assert name == "test"
    assert await workers.run(lambda: threading.current_thread().daemon)


async def test_calls_beyond_the_threads_wait_in_order_and_beyond_that_are_refused(
    gate: threading.Event,
) -> None:
    workers, order = Workers("test", num_workers=1, max_waiting=2), list[int]()
    running = asyncio.create_task(workers.run(lambda: gate.wait(10)))
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(workers.run(lambda index=index: order.append(index))) for index in (1, 2)]  # type: ignore[misc]
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError):
        await workers.run(lambda: None)
    gate.set()
    await asyncio.gather(running, *waiting)
    assert order == [1, 2]


async def test_one_that_gives_up_waiting_costs_nobody_a_turn(gate: threading.Event) -> None:
    workers = Workers("test", num_workers=1, max_waiting=2)
    running = asyncio.create_task(workers.run(lambda: gate.wait(10)))
    await asyncio.sleep(0)
    leaving = asyncio.create_task(workers.run(lambda: pytest.fail("it has left")))
    staying = asyncio.create_task(workers.run(lambda: 7))
    await asyncio.sleep(0)
    leaving.cancel()
    gate.set()
    assert await staying == 7
    await running
    await asyncio.wait([leaving])
    assert leaving.cancelled()
    assert await workers.run(lambda: 8) == 8


async def test_a_stuck_call_is_given_up_and_its_thread_counts_as_lost_until_it_returns(
    gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    workers = Workers("test", num_workers=1, max_waiting=2)
    stuck = asyncio.create_task(workers.run(lambda: gate.wait(10), deadline_s=0.05))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(workers.run(lambda: None))
    with pytest.raises(DeadlineError):
        await stuck
    with pytest.raises(WorkersLostError):
        await waiting
    with pytest.raises(WorkersLostError):
        await workers.run(lambda: None)
    assert "1 of 1 threads are stuck" in caplog.text
    gate.set()
    results: list[int] = []

    async def call() -> None:
        while not results:
            try:
                results.append(await workers.run(lambda: 5))
            except WorkersLostError:
                await asyncio.sleep(0.005)

    await asyncio.wait_for(call(), 5)
    assert results == [5]


async def test_a_call_whose_caller_left_is_still_watched(
    gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    workers = Workers("test", num_workers=1, max_waiting=2)
    leaving = asyncio.create_task(workers.run(lambda: gate.wait(10), deadline_s=0.05))
    await asyncio.sleep(0)
    leaving.cancel()
    await until(lambda: "are stuck" in caplog.text)
    with pytest.raises(WorkersLostError):
        await workers.run(lambda: None)


async def test_python_code_that_never_ends_is_interrupted() -> None:
    workers = Workers("test-endless", num_workers=1, max_waiting=2)

    def loop() -> None:
        while True:
            pass

    for _ in range(2):
        with pytest.raises(DeadlineError):
            await workers.run(loop, deadline_s=0.05)
        await until(lambda: all(thread.name != "test-endless" for thread in threading.enumerate()))
    assert await workers.run(lambda: 5) == 5
