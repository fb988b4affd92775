"""A random run seen by clients of every pace: Python's and JavaScript's picture are the engine's state."""

import json
import random
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from app.realtime import journal
from app.realtime.hub import EventHub, Resume, Subscription
from engine.core import EngineCore
from tests.builders import random_run, state_from_books
from tests.support.node import run_node
from tests.support.wire import Picture, make_ack, missing_rows, packed_cells

NUM_STEPS = 2000
STEP_S = 0.02


class FakeClock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Client:
    """A page that paints each message `delay()` seconds after it came and checks every picture."""

    def __init__(
        self, name: str, delays: Iterator[float], *, fps: int = 60, reconnects: bool = False
    ) -> None:
        self.name = name
        self.picture = Picture()
        self.messages: list[bytes] = []
        self.expected: list[dict[str, Any]] = []
        self.num_connections = 0
        self._delays = delays
        self._fps = fps
        self._reconnects = reconnects
        self._sent = 0
        self._unpainted: list[tuple[float, int]] = []  # (when it is painted, number of the message)
        self._stack = ExitStack()
        self._subscription: Subscription | None = None

    def connect(self, hub: EventHub) -> None:
        after = self.picture.rows[-1] if self.picture.rows else None
        self._stack.close()
        self._subscription = self._stack.enter_context(hub.subscribe(Resume(after, hub.session_id)))
        self._sent, self._unpainted = 0, []
        self.num_connections += 1

    def turn(self, hub: EventHub, core: EngineCore, rng: random.Random) -> None:
        if self._subscription is None or (self._reconnects and rng.random() < 0.01):
            self.connect(hub)
        assert self._subscription is not None
        while self._unpainted and self._unpainted[0][0] <= hub.clock():
            painted = self._unpainted.pop(0)[1]
            self._subscription.on_message(make_ack(painted, fps=self._fps, hidden=self._fps == 1))
        if self._subscription.is_due():
            self._take(b"".join(frame.encode() for frame in self._subscription.take()), hub, core)

    def _take(self, message: bytes, hub: EventHub, core: EngineCore) -> None:
        assert hub.snapshot is not None
        self.picture.apply(message)
        cells = packed_cells(state_from_books(core)["blocks"])
        assert self.picture.step == hub.snapshot.step, self.name
        assert self.picture.cells == cells, f"{self.name}, step {hub.snapshot.step}"
        assert self.picture.rows[-1] == hub.snapshot.step
        assert self.picture.host == host_facts(core)
        self.messages.append(message)
        self.expected.append(
            {
                "step": hub.snapshot.step,
                "cells": cells,
                "rows": len(set(self.picture.rows)),
                "host": self.picture.host,
            }
        )
        self._sent += 1
        self._unpainted.append((hub.clock() + next(self._delays), self._sent))
        assert len(self._unpainted) <= 2, "two messages at most are on their way"


def host_facts(core: EngineCore) -> dict[str, int] | None:
    """Describe the host tier from the engine's books; None when there is none."""
    if core.config.num_host_blocks == 0:
        return None
    kv, running = core.scheduler.state.kv, core.scheduler.state.running
    num_loading = sum(sequence.load_id != 0 for sequence in running)
    return {
        "total": kv.host.num_blocks,
        "used": kv.host.num_used,
        "pinned": kv.host.num_pinned,
        "loading": num_loading,
    }


def _random_delays(seed: int, longest_s: float) -> Iterator[float]:
    rng = random.Random(seed)
    while True:
        yield rng.random() ** 3 * longest_s


def _make_clients() -> list[Client]:
    return [
        Client("prompt", _random_delays(1, 0.0)),
        Client("as fast as painting", _random_delays(2, 0.1)),
        Client("slow", _random_delays(3, 4.0)),
        Client("very slow", _random_delays(4, 30.0)),
        Client("hidden", _random_delays(5, 0.0), fps=1),
        Client("reconnecting", _random_delays(6, 0.5), reconnects=True),
    ]


def _drive(seed: int, clients: list[Client], **overrides: Any) -> EventHub:
    rng, clock = random.Random(seed), FakeClock()
    hub = EventHub("s1", clock=clock, wall_ns=lambda: 0)
    for core, result in random_run(seed, NUM_STEPS, **overrides):
        if hub.snapshot is None:
            hub.open(core.config, "fake")
        hub.publish([result.record])
        clock.now += STEP_S
        for client in clients:
            client.turn(hub, core, rng)
    assert hub.snapshot is not None
    totals = hub.snapshot.totals
    assert totals.num_preemptions > 0
    assert totals.num_hit_tokens > 0
    assert totals.num_evictions > 0
    assert totals.num_aborted > 0
    return hub


def _replay_in_javascript(client: Client, folder: Path) -> list[dict[str, Any]]:
    path = folder / "messages.bin"
    path.write_bytes(b"".join(struct.pack("<I", len(message)) + message for message in client.messages))
    return [json.loads(line) for line in run_node("replay_frames.mjs", path).splitlines()]


HOST_TIER = {"policy": "priority", "num_host_blocks": 40, "load_steps": 3, "policy_rate": 0.02}


@pytest.mark.parametrize(
    ("seed", "overrides"),
    [(1, {}), (2, {"num_blocks": 40, "max_num_seqs": 12, "fail_rate": 0.01, **HOST_TIER}), (4, HOST_TIER)],
)
def test_every_client_sees_the_engine_as_it_is(seed: int, overrides: dict[str, Any], tmp_path: Path) -> None:
    clients = _make_clients()
    hub = _drive(seed, clients, **overrides)
    assert hub.snapshot is not None
    if "fail_rate" in overrides:
        assert hub.snapshot.totals.num_resets > 0
    for client in clients:
        assert client.picture.gaps == []
        assert missing_rows(client.picture.rows, client.picture.gaps) == []
        seen = _replay_in_javascript(client, tmp_path)
        keys = ("step", "cells", "rows", "host")
        assert [{key: line[key] for key in keys} for line in seen] == client.expected
    assert clients[-1].num_connections > 3
    prompt = clients[0].picture
    assert prompt.num_keyframes > 1, "a keyframe replaces a delta when much has changed"
    assert prompt.num_deltas > NUM_STEPS / 4
    assert sorted(set(prompt.rows)) == list(range(1, NUM_STEPS + 1))


def test_rows_that_are_lost_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "KEPT_ROWS", 64)
    monkeypatch.setattr(journal, "KEPT_MARKS", 256)
    clients = _make_clients()
    _drive(3, clients)
    very_slow = next(client for client in clients if client.name == "very slow")
    assert very_slow.picture.gaps
    assert very_slow.picture.marks_lost > 0
    for client in clients:
        assert missing_rows(client.picture.rows, client.picture.gaps) == []
        seen = _replay_in_javascript(client, tmp_path)
        assert [line["cells"] for line in seen] == [known["cells"] for known in client.expected]
        told = [{"firstStep": first, "nSteps": count} for first, count in client.picture.gaps]
        assert seen[-1]["gaps"] == told[-256:]
        assert seen[-1]["marksLost"] == client.picture.marks_lost
        assert seen[-1]["rowsLost"] == sum(count for _, count in client.picture.gaps)
