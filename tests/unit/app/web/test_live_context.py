"""What the live page says, from snapshots of small engines."""

import pytest

from app.realtime.hub import EventHub
from app.web.live_context import (
    MAX_ROWS,
    REASON_WORDS,
    STATE_WORDS,
    describe_reasons,
    format_age,
    make_panels,
    make_recorded_panels,
    short_id,
)
from app.web.table_context import make_tables
from app.web.templating import NO_VALUE
from engine.core import EngineCore
from engine.records import StopReason
from engine.views import BlockState
from tests.builders import make_core, make_request, random_run


def hub_of(core: EngineCore, steps: int) -> EventHub:
    hub = EventHub("s")
    hub.open(core.config, "m")
    for _ in range(steps):
        hub.publish([core.step().record])
    return hub


def test_while_the_model_loads_the_panels_are_empty_and_say_so() -> None:
    panels = make_panels(None)
    assert not panels.is_open
    assert (panels.num_blocks, panels.used_text, panels.running, panels.waiting) == (0, NO_VALUE, [], [])
    assert make_tables(None)["by_state"] == []


def test_the_panels_count_the_pages_that_watch() -> None:
    core = make_core()
    core.add_request(make_request("r"))
    snapshot = hub_of(core, 1).snapshot
    assert make_panels(snapshot, num_watching=2).num_watching == 2
    assert make_panels(None, num_watching=2).num_watching == 0


def test_recorded_panels_tell_how_long_a_request_had_waited_then() -> None:
    core = make_core(num_blocks=2, max_num_seqs=1, max_model_len=8)
    for number in range(2):
        core.add_request(make_request(f"r-{number}", prompt=5, max_tokens=2))
    snapshot = hub_of(core, 2).snapshot
    assert snapshot is not None
    snapshot.t_ns = snapshot.waiting[0].arrived_ns + 90_000_000_000
    panels = make_recorded_panels(snapshot)
    assert panels.is_recorded
    assert panels.waiting[0].detail.startswith("1 min 30 s: ")


def test_a_running_request_shows_how_far_it_is() -> None:
    core = make_core(num_blocks=32, max_num_batched_tokens=8, max_model_len=64)
    core.add_request(make_request("chatcmpl-0123456789ab", prompt=20, max_tokens=20))
    hub = hub_of(core, 1)
    (row,) = make_panels(hub.snapshot).running
    assert (row.short_id, row.state, row.detail) == ("01234567", "prefill", "40%")
    assert [(part.kind, part.x, part.width) for part in row.bar] == [("computed", 0, 200), ("todo", 200, 300)]
    for _ in range(2):
        hub.publish([core.step().record])
    assert make_panels(hub.snapshot).running[0].detail == "1 tok"
    for _ in range(2):
        hub.publish([core.step().record])
    (row,) = make_panels(hub.snapshot).running
    assert (row.state, row.detail) == ("decode", "3 tok")
    assert row.bar[-1].kind == "generated"


def test_a_waiting_request_says_why_and_since_when() -> None:
    core = make_core(num_blocks=2, max_num_seqs=4, max_model_len=8)
    for number in range(3):
        core.add_request(make_request(f"r-{number}", prompt=5, max_tokens=2))
    hub = hub_of(core, 1)
    panels = make_panels(hub.snapshot)
    assert panels.num_waiting == len(panels.waiting) == 2
    arrived_ns = hub.snapshot.waiting[0].arrived_ns if hub.snapshot else 0
    (row, _) = make_panels(hub.snapshot, now_ns=arrived_ns + 2_500_000_000).waiting
    assert row.detail == f"2.5 s: {REASON_WORDS[StopReason.NO_FREE_BLOCKS]}"
    assert [row.place for row in panels.waiting] == [1, 2]
    assert "behind 1 other; too few blocks are free" in panels.waiting[1].detail


def test_who_stands_behind_a_more_urgent_one_says_so() -> None:
    core = make_core(num_blocks=2, max_num_seqs=1, max_model_len=8, policy="priority")
    for number, priority in enumerate((0, 5, -5)):
        core.add_request(make_request(f"r-{number}", prompt=5, max_tokens=2, priority=priority))
    hub = hub_of(core, 1)
    panels = make_panels(hub.snapshot)
    assert panels.has_priorities
    (running,) = panels.running
    assert (running.short_id, running.priority, running.place) == ("2", -5, 0)
    assert [(row.short_id, row.priority, row.place) for row in panels.waiting] == [("0", 0, 1), ("1", 5, 2)]
    core.add_request(make_request("r-3", prompt=5, max_tokens=2, priority=-20))
    hub.publish([core.step().record])
    panels = make_panels(hub.snapshot)
    assert [row.short_id for row in panels.running] == ["3"]
    assert [row.short_id for row in panels.waiting] == ["2", "0", "1"]
    assert panels.waiting[1].detail.endswith(REASON_WORDS[StopReason.PRIORITY])


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_priorities_are_shown_once_a_request_has_one(policy: str) -> None:
    core = make_core(policy=policy)
    core.add_request(make_request("r"))
    hub = hub_of(core, 1)
    assert not make_panels(hub.snapshot).has_priorities
    core.add_request(make_request("s", priority=1))
    hub.publish([core.step().record])
    assert make_panels(hub.snapshot).has_priorities


def test_a_run_with_a_host_tier_shows_meter_loads_and_totals() -> None:
    hub = EventHub("s")
    states = set()
    for core, result in random_run(3, 400, policy="priority", num_host_blocks=40, load_steps=3):
        if hub.snapshot is None:
            hub.open(core.config, "m")
        hub.publish([result.record])
        panels = make_panels(hub.snapshot)
        host, tier = core.scheduler.state.kv.host, panels.host
        assert tier is not None
        assert (tier.total, tier.used, tier.pinned) == (40, host.num_used, host.num_pinned)
        loading = {sequence.seq_id for sequence in core.scheduler.state.running if sequence.load_id}
        assert {row.seq_id for row in panels.running if row.state == "loading"} == loading
        states |= {row.state for row in panels.running}
    assert "loading" in states
    assert hub.snapshot is not None
    totals = hub.snapshot.totals
    shown = {total.name: total for total in panels.totals}
    assert shown["swaps"].value == str(totals.num_swaps)
    assert shown["copies hidden"].value == f"{totals.num_loads_hidden} of {totals.num_loads}"
    assert shown["blocks ahead"].words.startswith(f"reserved before need; {totals.num_lookahead_unused} of")
    assert panels.policies.policy == "priority"


def test_without_a_host_tier_nothing_is_said_of_it() -> None:
    panels = make_panels(hub_of(make_core(), 0).snapshot)
    assert panels.host is None
    assert [total.name for total in panels.totals] == ["finished", "preemptions", "evictions"]


def test_the_bar_of_a_row_never_leaves_its_frame() -> None:
    hub = EventHub("s")
    for core, result in random_run(3, 400):
        if hub.snapshot is None:
            hub.open(core.config, "m")
        hub.publish([result.record])
        panels = make_panels(hub.snapshot)
        for row in panels.running + panels.waiting:
            ends = [part.x + part.width for part in row.bar]
            assert all(0 <= end <= 1000.2 for end in ends)
            assert [part.x for part in row.bar] == sorted(part.x for part in row.bar)


def test_the_table_counts_every_block_once() -> None:
    hub = EventHub("s")
    for core, result in random_run(5, 300, num_host_blocks=40, load_steps=3):
        if hub.snapshot is None:
            hub.open(core.config, "m")
        hub.publish([result.record])
        assert hub.snapshot is not None
        tables = make_tables(hub.snapshot)
        counted = {name: num for name, _, num, _ in tables["by_state"]}
        blocks = [hub.snapshot.block(block_id).state for block_id in range(core.config.num_blocks)]
        assert counted == {state.name.lower(): blocks.count(state) for state in list(BlockState)[:6]}
        for item in tables["by_request"]:
            parts = ("num_shared", "num_full", "num_tail", "num_reserved")
            assert item["num_blocks"] == sum(item[part] for part in parts)


def test_the_tables_give_the_batch_and_why_admission_stopped() -> None:
    assert make_tables(None)["batch"] is None
    core = make_core(num_blocks=32, max_num_seqs=1, max_model_len=64)
    for number in range(2):
        core.add_request(make_request(f"chatcmpl-{number}abc", prompt=5, max_tokens=2))
    hub = hub_of(core, 1)
    tables = make_tables(hub.snapshot)
    assert tables["batch"] == {"step": 1, "entries": [("0abc", 0, "prefill", 5)], "num_tokens": 5}
    assert tables["stop_words"] == REASON_WORDS[StopReason.MAX_NUM_SEQS]
    hub.publish([core.step().record])
    assert make_tables(hub.snapshot)["batch"]["entries"] == [("sequence 1, ended", 0, "decode", 1)]


def test_long_lists_are_cut_and_counted() -> None:
    core = make_core(num_blocks=2, max_num_seqs=1, max_model_len=8)
    for number in range(MAX_ROWS + 20):
        core.add_request(make_request(f"r-{number}", prompt=5, max_tokens=2))
    panels = make_panels(hub_of(core, 1).snapshot)
    assert len(panels.waiting) == MAX_ROWS
    assert panels.num_waiting == MAX_ROWS + 19


def test_every_state_and_reason_has_words() -> None:
    assert set(STATE_WORDS) == set(BlockState)
    assert [item.number for item in describe_reasons()] == list(StopReason)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0.0 s"), (0.44, "0.4 s"), (42, "42 s"), (61, "1 min 01 s"), (3720, "1 h 02 min")],
)
def test_ages_are_written_in_the_unit_that_suits_them(seconds: float, text: str) -> None:
    assert format_age(seconds) == text


def test_short_ids_keep_what_tells_requests_apart() -> None:
    assert short_id("chatcmpl-0123456789ab") == "01234567"
    assert short_id("r1") == "r1"
