"""What the live view costs: recording per step, a soak with a big pool, the state document.

Run as `python -m bench.hub` from the checkout. Asserts only that the pictures are right.
"""

import argparse
import asyncio
import gc
import itertools
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from app.realtime.hub import EventHub, Resume, Subscription
from app.realtime.state_json import encode_state
from app.realtime.step_rows import encode_marks, encode_row
from bench.common import percentile
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.records import StepRecord
from engine.runner.fake import FakeRunner
from engine.sampling_params import SamplingParams
from engine.sequence import EngineRequest
from engine.snapshot import EngineSnapshot
from tests.support.wire import Picture, make_ack

STEADY = EngineConfig(num_blocks=4096, max_num_seqs=64, max_num_batched_tokens=512, max_model_len=1024)
BIG = EngineConfig(
    num_blocks=100_000, max_num_seqs=256, max_num_batched_tokens=1024, max_model_len=4096, max_waiting=4096
)
STEPS_PER_S = 200


def make_records(config: EngineConfig, num_steps: int) -> list[StepRecord]:
    """Run an engine that is always full: prompts of 100 to 400 tokens over eight shared beginnings."""
    runner = FakeRunner(config.num_blocks, config.block_size)
    core = EngineCore(config, runner)
    requests = _make_requests()
    records: list[StepRecord] = []
    while len(records) < num_steps:
        while len(core.scheduler.state.waiting) < 8:
            core.add_request(next(requests))
        records.append(core.step().record)
    return records


def _make_requests() -> Iterator[EngineRequest]:
    for number in itertools.count():
        prompt = [number % 8 * 100 + position % 97 for position in range(96)]
        prompt += [(number * 31 + position * 7) % 1000 for position in range(4 + number * 37 % 300)]
        params = SamplingParams(max_tokens=100 + number * 53 % 200)
        yield EngineRequest(request_id=f"r{number}", prompt_token_ids=prompt, sampling_params=params)


class Client:
    """Takes what is due; `paint_s` later it says so (None: never)."""

    def __init__(
        self, hub: EventHub, stack: ExitStack, *, paint_s: float | None = 0.0, hidden: bool = False
    ) -> None:
        """Subscribe until the stack is left."""
        self.subscription: Subscription = stack.enter_context(hub.subscribe(Resume()))
        self.paint_s, self.hidden = paint_s, hidden
        self.num_messages = self.num_bytes = 0
        self.last = b""

    def take_if_due(self) -> None:
        """Take one message and acknowledge it at once."""
        if self.subscription.is_due():
            self._count(b"".join(frame.encode() for frame in self.subscription.take()))
            self._acknowledge()

    async def run(self, picture: Picture | None) -> None:
        """Take messages as they come; fold them into `picture`."""
        while True:
            message = await self.subscription.next_message()
            self._count(message)
            if picture is not None:
                picture.apply(message)
                picture.rows.clear()
                picture.marks.clear()
            if self.paint_s is None:
                continue
            await asyncio.sleep(self.paint_s)
            self._acknowledge()

    def _count(self, message: bytes) -> None:
        self.num_messages += 1
        self.num_bytes += len(message)

    def _acknowledge(self) -> None:
        self.subscription.on_message(make_ack(self.num_messages, hidden=self.hidden))


def measure_step_cost(records: list[StepRecord], num_clients: int) -> tuple[float, float]:
    """Return µs of CPU a step for publish alone and with all clients taking each step."""
    now = 0.0
    hub = EventHub("bench", clock=lambda: now)
    hub.open(STEADY, "bench")
    publish_ns = total_ns = 0
    with ExitStack() as stack:
        clients = [Client(hub, stack) for _ in range(num_clients)]
        for record in records:
            now += 0.02
            started = time.thread_time_ns()
            hub.publish([record])
            published = time.thread_time_ns()
            for client in clients:
                client.take_if_due()
            total_ns += time.thread_time_ns() - started
            publish_ns += published - started
        assert all(client.num_messages == len(records) for client in clients)
    return publish_ns / len(records) / 1e3, total_ns / len(records) / 1e3


def measure_each(records: list[StepRecord], function: Callable[[StepRecord], object]) -> float:
    """Return µs of CPU a step."""
    started = time.thread_time_ns()
    for record in records:
        function(record)
    return (time.thread_time_ns() - started) / len(records) / 1e3


def report_step_cost(num_steps: int) -> None:
    """Print the cost of recording at 64 sequences."""
    records = make_records(STEADY, num_steps)
    batch = sum(len(record.batch) for record in records) / len(records)
    ops = sum(len(record.block_ops) for record in records) / len(records)
    gc.collect()
    gc.freeze()
    print(
        f"\nRecording, {num_steps} steps, {batch:.1f} sequences and {ops:.1f} block operations in a mean step"
    )
    print("  part                           µs CPU a step")
    print(f"  fold (EngineSnapshot.apply)         {measure_each(records, EngineSnapshot(STEADY).apply):8.1f}")
    print(f"  encode step row                     {measure_each(records, encode_row):8.1f}")
    print(f"  encode marks                        {measure_each(records, encode_marks):8.1f}")
    for num_clients in (0, 1, 10):
        publish, total = measure_step_cost(records, num_clients)
        print(f"  {num_clients:2} clients: publish {publish:8.1f}   all {total:8.1f}")


async def measure_lag(lags: list[float]) -> None:
    """Note by how much a 2 ms sleep comes late."""
    while True:
        started = time.perf_counter()
        await asyncio.sleep(0.002)
        lags.append((time.perf_counter() - started - 0.002) * 1e3)


def _quantiles(lags: list[float]) -> str:
    return f"p50 {percentile(lags, 50):.1f}, p99 {percentile(lags, 99):.1f}, max {max(lags):.1f} ms"


async def soak(seconds: float) -> None:
    """Publish 200 steps a second of a pool of 100,000 blocks to clients of every pace."""
    records = make_records(BIG, int(seconds * STEPS_PER_S))
    changes = sum(len(record.block_ops) + len(record.batch) for record in records) / len(records)
    hub = EventHub("bench")
    started = time.perf_counter()
    hub.open(BIG, "bench")
    print(f"\nSoak, {BIG.num_blocks} blocks, {STEPS_PER_S} steps/s, {changes:.0f} changes in a mean step")
    print(f"  open: {(time.perf_counter() - started) * 1e3:.1f} ms")
    lags: list[float] = []
    picture = Picture()
    with ExitStack() as stack:
        clients = {name: Client(hub, stack) for name in ("at once", "2nd", "3rd", "4th", "5th", "6th")}
        clients["after 1 s"] = Client(hub, stack, paint_s=1.0)
        clients["hidden"] = Client(hub, stack, hidden=True)
        clients["never"] = Client(hub, stack, paint_s=None)
        tasks = [
            asyncio.create_task(client.run(picture if name == "at once" else None))
            for name, client in clients.items()
        ]
        tasks.append(asyncio.create_task(measure_lag(lags)))
        grown = await _publish_paced(hub, records)
        await asyncio.sleep(2.5)
        assert hub.snapshot is not None
        assert picture.step == hub.snapshot.step
        assert picture.cells == _cells_of(hub)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    print(f"  loop lag: {_quantiles(lags)}")
    print(f"  memory grown from the middle to the end: {grown / 1024:.0f} KiB")
    for name in ("at once", "after 1 s", "hidden", "never"):
        client = clients[name]
        print(
            f"  client painting {name:10} {client.num_messages:5} messages {client.num_bytes / 1024:8.0f} KiB"
        )
    await report_state_document(hub)


def _cells_of(hub: EventHub) -> list[int]:
    with hub.subscribe(Resume()) as subscription:
        picture = Picture()
        picture.apply(b"".join(frame.encode() for frame in subscription.take()))
        return picture.cells


async def _publish_paced(hub: EventHub, records: list[StepRecord]) -> int:
    """Return by how many bytes the process has grown in the second half."""
    start, before = time.perf_counter(), 0
    for number, record in enumerate(records):
        hub.publish([record])
        if number == len(records) // 2:
            before = _resident_bytes()
        await asyncio.sleep(max(0.0, start + number / STEPS_PER_S - time.perf_counter()))
    return _resident_bytes() - before


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


async def report_state_document(hub: EventHub) -> None:
    """Print what `GET /api/engine/state` costs with 100,000 blocks."""
    print(f"\nState document, {BIG.num_blocks} blocks")
    for with_blocks in (True, False):
        lags: list[float] = []
        lag = asyncio.create_task(measure_lag(lags))
        await asyncio.sleep(0.01)
        started = time.perf_counter()
        body = await encode_state(hub, {}, with_blocks=with_blocks)
        took = time.perf_counter() - started
        await asyncio.sleep(0.01)
        lag.cancel()
        size = f"{len(body) / 1024:8.0f} KiB in {took * 1e3:6.1f} ms"
        print(f"  blocks={int(with_blocks)}: {size}, loop lag {_quantiles(lags)}")


def main() -> None:
    """Run all three."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=10.0)
    arguments = parser.parse_args()
    report_step_cost(arguments.steps)
    asyncio.run(soak(arguments.seconds))


if __name__ == "__main__":
    main()
