import asyncio
import gc
import itertools
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from app.realtime import decisions, journal
from app.realtime.hub import MAX_SUBSCRIPTIONS, EventHub, Resume, Subscription, SubscriptionEndedError
from engine.core import EngineCore
from engine.errors import EngineInvariantError
from engine.records import StepRecord
from engine.snapshot import EngineSnapshot
from tests.builders import make_core, make_request, random_run, state_from_books
from tests.support.wire import Picture, make_ack, missing_rows, packed_cells, read_frames


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Watcher:
    """A subscription that acknowledges by hand."""

    def __init__(self, hub: EventHub, resume: Resume | None = None) -> None:
        self.picture = Picture()
        self.num_taken = 0
        self._stack = ExitStack()
        self.subscription: Subscription = self._stack.enter_context(hub.subscribe(resume or Resume()))

    def take(self) -> bytes:
        message = b"".join(frame.encode() for frame in self.subscription.take())
        self.picture.apply(message)
        self.num_taken += 1
        return message

    def ack(self, painted: int | None = None, *, fps: int = 60, hidden: bool = False) -> None:
        painted = self.num_taken if painted is None else painted
        self.subscription.on_message(make_ack(painted, fps=fps, hidden=hidden))

    def leave(self) -> None:
        self._stack.close()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def hub(clock: FakeClock) -> EventHub:
    return EventHub("s1", clock=clock, wall_ns=lambda: 5_000_000)


@pytest.fixture
def core() -> EngineCore:
    return make_core(num_blocks=64, max_model_len=128)


def open_hub(hub: EventHub, core: EngineCore) -> None:
    hub.open(core.config, "fake")


def step(hub: EventHub, core: EngineCore) -> None:
    result = core.step() if core.has_work else core.flush()
    assert result is not None
    hub.publish([result.record])


def start_work(core: EngineCore, num: int = 2, max_tokens: int = 40) -> None:
    for index in range(num):
        core.add_request(make_request(f"r{index}", prompt=9, max_tokens=max_tokens))


def kinds(message: bytes) -> list[int]:
    return [frame["kind"] for frame in read_frames(message)]


def test_a_client_gets_hello_then_the_whole_picture_then_changes(hub: EventHub, core: EngineCore) -> None:
    open_hub(hub, core)
    start_work(core)
    step(hub, core)
    watcher = Watcher(hub)
    assert kinds(watcher.take()) == [1, 2, 4, 5, 6]
    assert not watcher.subscription.is_due()
    step(hub, core)
    assert kinds(watcher.take())[:3] == [3, 4, 5]
    assert watcher.picture.rows == [1, 2]
    assert watcher.picture.cells == packed_cells(state_from_books(core)["blocks"])


def test_before_the_engine_is_ready_there_is_only_hello(hub: EventHub, core: EngineCore) -> None:
    watcher = Watcher(hub)
    assert kinds(watcher.take()) == [1]
    assert watcher.picture.hello is not None
    assert (watcher.picture.hello["status"], watcher.picture.hello["config"]) == ("loading", None)
    assert not watcher.subscription.is_due()
    open_hub(hub, core)
    assert kinds(watcher.take()) == [1, 2]
    assert watcher.picture.hello["status"] == "ready"
    assert watcher.picture.cells == [0xFFFF0000] * 64


def test_a_change_of_status_is_told_without_a_new_picture(hub: EventHub, core: EngineCore) -> None:
    open_hub(hub, core)
    watcher = Watcher(hub)
    watcher.take()
    hub.set_status("draining")
    assert kinds(watcher.take()) == [1]
    assert watcher.picture.hello is not None
    assert watcher.picture.hello["status"] == "draining"


def test_two_messages_at_most_are_unacknowledged(hub: EventHub, core: EngineCore, clock: FakeClock) -> None:
    open_hub(hub, core)
    start_work(core)
    watcher = Watcher(hub)
    due = []
    for _ in range(4):
        step(hub, core)
        clock.now += 1
        due.append(watcher.subscription.is_due())
        if due[-1]:
            watcher.take()
    assert due == [True, True, False, False]
    watcher.ack(1)
    assert watcher.subscription.is_due()
    assert kinds(watcher.take())[:3] == [3, 4, 5]
    assert watcher.picture.rows == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("fps", "hidden", "seconds"), [(60, False, 1 / 60), (10, False, 0.1), (60, True, 1.0)]
)
def test_messages_keep_the_pace_that_the_client_wants(
    hub: EventHub, core: EngineCore, clock: FakeClock, fps: int, hidden: bool, seconds: float
) -> None:
    open_hub(hub, core)
    start_work(core)
    step(hub, core)
    watcher = Watcher(hub)
    watcher.take()
    watcher.ack(fps=fps, hidden=hidden)
    step(hub, core)
    clock.now += seconds * 0.95
    assert not watcher.subscription.is_due()
    clock.now += seconds * 0.1
    assert watcher.subscription.is_due()


def test_a_slow_client_gets_the_newest_state_and_every_row(
    hub: EventHub, core: EngineCore, clock: FakeClock
) -> None:
    open_hub(hub, core)
    start_work(core, num=4, max_tokens=60)
    watcher = Watcher(hub)
    watcher.take()
    watcher.ack()
    for _ in range(50):
        step(hub, core)
    clock.now += 1
    assert kinds(watcher.take())[0] == 2, "more than a quarter has changed"
    assert watcher.picture.rows == list(range(1, 51))
    assert watcher.picture.cells == packed_cells(state_from_books(core)["blocks"])


def test_rows_that_the_ring_lost_are_a_gap(
    monkeypatch: pytest.MonkeyPatch, hub: EventHub, core: EngineCore
) -> None:
    monkeypatch.setattr(journal, "KEPT_ROWS", 10)
    open_hub(hub, core)
    start_work(core)
    watcher = Watcher(hub)
    watcher.take()
    for _ in range(25):
        step(hub, core)
    assert kinds(watcher.take())[:3] == [2, 7, 4]
    assert watcher.picture.gaps == [(1, 15)]
    assert watcher.picture.rows == list(range(16, 26))


def test_marks_over_the_limit_are_counted(
    monkeypatch: pytest.MonkeyPatch, hub: EventHub, core: EngineCore
) -> None:
    monkeypatch.setattr(journal, "MAX_MARKS_A_MESSAGE", 5)
    open_hub(hub, core)
    watcher = Watcher(hub)
    watcher.take()
    start_work(core)
    for _ in range(10):
        step(hub, core)
    watcher.take()
    assert len(watcher.picture.marks) == 5
    assert watcher.picture.marks_lost > 0


@pytest.mark.parametrize(
    ("resume", "rows"),
    [
        (Resume(), range(1, 13)),
        (Resume(7, "s1"), range(8, 13)),
        (Resume(0, "s1"), range(1, 13)),
        (Resume(12, "s1"), range(0)),
        (Resume(7, "another run"), range(1, 13)),
        (Resume(7), range(8, 13)),
        (Resume(999), range(1, 13)),
    ],
)
def test_a_page_that_comes_back_gets_the_rows_it_missed_and_a_whole_picture(
    hub: EventHub, core: EngineCore, resume: Resume, rows: range
) -> None:
    open_hub(hub, core)
    start_work(core)
    for _ in range(12):
        step(hub, core)
    watcher = Watcher(hub, resume)
    assert kinds(watcher.take())[:2] == [1, 2]
    assert watcher.picture.rows == list(rows)
    assert watcher.picture.gaps == []


def test_a_new_page_gets_the_newest_rows_only(
    monkeypatch: pytest.MonkeyPatch, hub: EventHub, core: EngineCore
) -> None:
    monkeypatch.setattr(journal, "FIRST_ROWS", 4)
    open_hub(hub, core)
    start_work(core)
    for _ in range(12):
        step(hub, core)
    watcher = Watcher(hub)
    watcher.take()
    assert watcher.picture.rows == [9, 10, 11, 12]
    assert all(mark[0] >= 9 for mark in watcher.picture.marks)
    assert watcher.picture.gaps == []


def test_a_hub_may_begin_with_a_state_of_its_own(hub: EventHub) -> None:
    snapshot: EngineSnapshot | None = None
    watcher: Watcher | None = None
    for engine, result in random_run(5, 60):
        if result.record.step < 40:
            snapshot = snapshot or EngineSnapshot(engine.config)
            snapshot.apply(result.record)
            continue
        if hub.snapshot is None:
            hub.open(engine.config, "fake", snapshot)
            watcher = Watcher(hub)
        hub.publish([result.record])
        assert watcher is not None
        watcher.take()
        assert watcher.picture.cells == packed_cells(state_from_books(engine)["blocks"])
    assert watcher is not None
    assert watcher.picture.rows == list(range(40, 61))


def test_a_reset_brings_a_keyframe(hub: EventHub, core: EngineCore) -> None:
    open_hub(hub, core)
    start_work(core)
    step(hub, core)
    watcher = Watcher(hub)
    watcher.take()
    hub.publish([core.fail_all("boom").record])
    assert kinds(watcher.take())[:2] == [2, 4]
    assert watcher.picture.cells == [0xFFFF0000] * 64
    assert watcher.picture.last_row is not None
    assert watcher.picture.last_row["flags"] == 1


@pytest.mark.parametrize(
    "data", [None, b"", b"\0" * 12, make_ack(1) + b"x", make_ack(5), make_ack(1, fps=0), b"x" * 5000]
)
def test_a_message_that_is_no_ack_ends_the_subscription(hub: EventHub, data: object) -> None:
    watcher = Watcher(hub)
    watcher.take()
    with pytest.raises(SubscriptionEndedError) as ended:
        watcher.subscription.on_message(data)
    assert ended.value.code == 1008


def test_acknowledgements_never_go_back(hub: EventHub) -> None:
    watcher = Watcher(hub)
    watcher.take()
    watcher.ack(1)
    watcher.ack(1)
    with pytest.raises(SubscriptionEndedError):
        watcher.ack(0)


def test_a_client_that_is_silent_while_it_owes_an_answer_is_dropped(
    hub: EventHub, core: EngineCore, clock: FakeClock
) -> None:
    open_hub(hub, core)
    watcher, quiet = Watcher(hub), Watcher(hub)
    watcher.take()
    watcher.ack()
    quiet.take()
    clock.now += 59
    assert quiet.subscription.check_silence() == 1
    clock.now += 2
    assert watcher.subscription.check_silence() == 60, "it owes nothing"
    with pytest.raises(SubscriptionEndedError) as ended:
        quiet.subscription.check_silence()
    assert ended.value.code == 1013


async def test_a_client_that_has_taken_everything_may_be_silent_for_ever(
    hub: EventHub, core: EngineCore, clock: FakeClock
) -> None:
    open_hub(hub, core)
    watcher = Watcher(hub)
    await watcher.subscription.next_message()
    clock.now += 61
    with pytest.raises(SubscriptionEndedError, match="no answer for 60 s"):
        watcher.subscription.check_silence()
    watcher.ack(1)
    with pytest.raises(SubscriptionEndedError, match="nothing taken for 60 s"):
        watcher.subscription.check_silence()
    waiting = asyncio.create_task(watcher.subscription.next_message())
    await asyncio.sleep(0)
    clock.now += 1000
    assert watcher.subscription.check_silence() == 60
    waiting.cancel()


def test_only_so_many_clients_are_served(hub: EventHub) -> None:
    watchers = [Watcher(hub) for _ in range(MAX_SUBSCRIPTIONS)]
    with pytest.raises(SubscriptionEndedError) as refused:
        Watcher(hub)
    assert refused.value.code == 1013
    watchers[0].leave()
    Watcher(hub)


async def test_close_ends_every_subscription_and_refuses_new_ones(hub: EventHub, core: EngineCore) -> None:
    open_hub(hub, core)
    watchers = [Watcher(hub) for _ in range(3)]
    for watcher in watchers:
        await watcher.subscription.next_message()
    waiting = [asyncio.create_task(watcher.subscription.next_message()) for watcher in watchers]
    await asyncio.sleep(0)
    hub.close()
    hub.close()
    endings = await asyncio.gather(*waiting, return_exceptions=True)
    assert [getattr(ending, "code", None) for ending in endings] == [1012] * 3
    with pytest.raises(SubscriptionEndedError):
        Watcher(hub)


async def test_news_wakes_a_waiting_client(core: EngineCore) -> None:
    hub = EventHub("s1")
    open_hub(hub, core)
    start_work(core)
    watcher = Watcher(hub)
    first = await watcher.subscription.next_message()
    assert kinds(first) == [1, 2]
    waiting = asyncio.create_task(watcher.subscription.next_message())
    await asyncio.sleep(0)
    step(hub, core)
    assert kinds(await asyncio.wait_for(waiting, 5)) == [3, 4, 5, 6]
    waiting = asyncio.create_task(watcher.subscription.next_message())
    await asyncio.sleep(0)
    step(hub, core)
    await asyncio.sleep(0)
    assert not waiting.done(), "two messages are unacknowledged"
    watcher.ack(1)
    assert kinds(await asyncio.wait_for(waiting, 5))[:3] == [3, 4, 5]


async def test_an_answer_wakes_a_client_only_if_it_changes_what_may_be_sent(core: EngineCore) -> None:
    hub = EventHub("s1")
    open_hub(hub, core)
    start_work(core)
    watcher = Watcher(hub)
    await watcher.subscription.next_message()
    waiting = asyncio.create_task(watcher.subscription.next_message())
    await asyncio.sleep(0)
    watcher.ack(1)
    assert not watcher.subscription._wake.is_set(), "it waits for news"
    watcher.ack(1, fps=10)
    assert watcher.subscription._wake.is_set(), "it may be due at another time"
    step(hub, core)
    assert kinds(await asyncio.wait_for(waiting, 5)) == [3, 4, 5, 6]


async def test_clients_that_are_given_the_same_frames_are_sent_the_same_bytes(core: EngineCore) -> None:
    hub = EventHub("s1")
    open_hub(hub, core)
    start_work(core)
    watchers = [Watcher(hub) for _ in range(3)]
    for watcher in watchers:
        await watcher.subscription.next_message()
    step(hub, core)
    first, second = [await watcher.subscription.next_message() for watcher in watchers[:2]]
    assert first is second
    step(hub, core)
    late = await watchers[2].subscription.next_message()
    assert late != first
    for watcher in watchers:
        watcher.ack(1)
    assert await watchers[0].subscription.next_message() != late


async def test_a_cancelled_wait_leaves_nothing_behind(core: EngineCore) -> None:
    hub = EventHub("s1")
    open_hub(hub, core)

    async def watch() -> None:
        with hub.subscribe(Resume()) as subscription:
            while True:
                await subscription.next_message()

    for turns in range(6):
        task = asyncio.create_task(watch())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert hub.num_clients == 0


def test_a_record_that_does_not_follow_closes_the_view_and_harms_nothing_else(
    hub: EventHub, core: EngineCore, caplog: pytest.LogCaptureFixture
) -> None:
    open_hub(hub, core)
    start_work(core)
    step(hub, core)
    watcher = Watcher(hub)
    watcher.take()
    core.step()
    step(hub, core)
    assert hub.has_failed
    assert "does not add up" in caplog.text
    with pytest.raises(SubscriptionEndedError) as ended:
        watcher.subscription.is_due()
    assert ended.value.code == 1011
    step(hub, core)


def test_records_before_open_and_a_second_open_are_bugs(hub: EventHub, core: EngineCore) -> None:
    start_work(core)
    record = core.step().record
    with pytest.raises(EngineInvariantError):
        hub.publish([record])
    open_hub(hub, core)
    with pytest.raises(EngineInvariantError):
        open_hub(hub, core)


def _records() -> Iterator[tuple[EngineCore, StepRecord]]:
    for core, result in random_run(9, 3000):
        yield core, result.record


def test_a_client_that_never_reads_costs_no_memory(monkeypatch: pytest.MonkeyPatch, hub: EventHub) -> None:
    monkeypatch.setattr(journal, "KEPT_ROWS", 256)
    monkeypatch.setattr(journal, "KEPT_MARKS", 256)
    monkeypatch.setattr(decisions, "MAX_KEPT_STEPS", 64)
    run = [(core.config, record) for core, record in _records()]
    hub.open(run[0][0], "fake")
    watchers = [Watcher(hub) for _ in range(10)]
    for _, record in itertools.islice(run, 1500):
        hub.publish([record])
    gc.collect()
    tracemalloc.start()
    for _, record in itertools.islice(run, 1500, None):
        hub.publish([record])
    gc.collect()
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 64 * 1024
    for watcher in watchers:
        watcher.take()
        assert missing_rows(watcher.picture.rows, watcher.picture.gaps) == []
