"""What is said of the scheduler's decisions, of every one in random runs and of chosen ones."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from app.realtime.decisions import DecisionLog, StepDecisions, make_decisions
from app.web.decision_context import SCORE_WORDS, list_links, list_newest, make_decisions_view
from app.web.templating import NO_VALUE, make_environment
from engine.config import EngineConfig
from engine.records import Admitted, Arrived, Event, Loaded, Policies, Preempted, PrefixMiss, Stalled
from engine.scheduling.preemption import PREEMPTION_POLICIES
from engine.snapshot import EngineSnapshot
from tests.builders import make_config, random_run
from tests.support.step_records import make_record

HOST_TIER = {"policy": "priority", "num_host_blocks": 40, "load_steps": 3, "policy_rate": 0.02}


PRIORITIES = {1: -5, 2: 0, 3: 10, 4: 10, 5: 10}


def decide(*events: Event, **config: Any) -> StepDecisions:
    """Return the decisions of a step that follows the arrival of sequences 1 to 5, all called r-N."""
    before = EngineSnapshot(make_config(**config))
    arrivals: list[Event] = [
        Arrived(number, f"r-{number}", 0, 4, 4, 1, priority=PRIORITIES[number]) for number in range(1, 6)
    ]
    before.apply(make_record(step=1, events=arrivals, num_free=8, num_waiting=5))
    return make_decisions(before, make_record(step=2, events=list(events)))


def preempt(**values: Any) -> Preempted:
    facts: dict[str, Any] = {
        "seq_id": 3,
        "slot": 1,
        "policy": "oldest-first",
        "mode": "recompute",
        "num_tokens_lost": 9,
        "num_blocks_freed": 3,
        "beneficiary": 1,
        "candidates": [(3, 3.0), (4, 4.0)],
        **values,
    }
    return Preempted(**facts)


def run_decisions(seed: int, num_steps: int, **overrides: Any) -> Iterator[tuple[StepDecisions, list[Event]]]:
    snapshot: EngineSnapshot | None = None
    for core, result in random_run(seed, num_steps, **overrides):
        snapshot = snapshot or EngineSnapshot(core.config)
        yield make_decisions(snapshot, result.record), result.record.events
        snapshot.apply(result.record)


def test_every_preemption_of_a_run_is_told_with_all_candidates_and_its_victim_first() -> None:
    modes, needs = set(), set()
    for found, events in run_decisions(3, 400, **HOST_TIER):
        view = make_decisions_view(found)
        recorded = [event for event in events if isinstance(event, Preempted)]
        for one, event in zip(view.preemptions, recorded, strict=True):
            modes.add(one.mode)
            assert {line.party.seq_id for line in one.candidates} == dict(event.candidates).keys()
            assert [line.is_victim for line in one.candidates] == [
                True,
                *([False] * (len(event.candidates) - 1)),
            ]
            assert one.victim.seq_id == event.seq_id
            assert all(line.party.request_id for line in one.candidates), "all have names"
            assert "does not say why" not in one.why_it
            needs.add(one.need)
    assert needs >= {"block", "room"}
    assert modes == {"swap", "recompute"}


def test_every_admission_of_a_run_adds_up_and_says_what_was_missing() -> None:
    words = set()
    for found, events in run_decisions(3, 400, **HOST_TIER):
        admitted = [event for event in events if isinstance(event, Admitted)]
        for one, event in zip(make_decisions_view(found).admissions, admitted, strict=True):
            assert one.num_tokens == one.num_cached_tokens + one.num_host_tokens + one.num_new_tokens
            assert one.num_new_tokens > 0
            assert one.party.request_id
            words.add(event.miss.kind if event.miss else None)
    assert words >= {"evicted", "differs", "new"}


def test_every_policy_has_words_for_its_score() -> None:
    assert SCORE_WORDS.keys() == set(PREEMPTION_POLICIES)


@pytest.mark.parametrize(
    ("candidates", "words"),
    [
        ([(3, 3.0)], "It was the only one whose blocks could be taken."),
        ([(3, 1234.0), (4, 2000.0)], "Its score, 1,234, is the lowest of 2."),
        ([(1, 0.7), (3, 0.7), (4, 0.9)], "2 of 3 have the lowest score, 0.7; of these it arrived last."),
        ([(3, 5.0), (4, 4.0)], "It was chosen; what is on record does not say why."),
    ],
)
def test_the_choice_is_explained_by_the_scores(candidates: list[tuple[int, float]], words: str) -> None:
    (one,) = make_decisions_view(decide(preempt(candidates=candidates))).preemptions
    assert one.why_it == words


def test_candidates_come_in_the_order_in_which_they_would_have_gone() -> None:
    candidates = [(1, 2.0), (2, 1.0), (3, 1.0), (4, 0.25)]
    (one,) = make_decisions_view(decide(preempt(candidates=candidates, seq_id=4))).preemptions
    assert [(line.party.seq_id, line.score) for line in one.candidates] == [
        (4, "0.25"),
        (3, "1"),
        (2, "1"),
        (1, "2"),
    ]
    assert [line.party.priority for line in one.candidates] == [10, 10, 0, -5]
    assert one.order_words.startswith("the lowest score goes first")


def test_under_priority_the_least_urgent_come_first_whatever_their_score() -> None:
    candidates = [(1, 0.0), (2, 1.0), (3, 7.0), (4, 9.0), (5, 7.0)]
    found = decide(preempt(candidates=candidates, seq_id=5, need="slot"), policy="priority")
    (one,) = make_decisions_view(found).preemptions
    assert [line.party.seq_id for line in one.candidates] == [5, 3, 4, 2, 1]
    assert one.candidates[0].is_victim
    assert one.order_words.startswith("the least urgent (highest priority number) go first")
    assert "the lowest score goes first" not in to_text(render(found))


@pytest.mark.parametrize(
    ("need", "candidates", "words"),
    [
        ("slot", [(3, 3.0)], "It was the only one whose blocks could be taken."),
        ("", [(3, 3.0)], "It was the only one on record that could have been taken."),
        ("slot", [(1, 0.0), (2, 1.0), (3, 3.0)], "It is the least urgent of 3, with priority 10."),
        (
            "room",
            [(1, 0.0), (3, 3.0), (4, 4.0)],
            "The 2 least urgent of 3 have priority 10; its score, 3, is the lowest of these.",
        ),
        ("block", [(3, 3.0), (4, 4.0)], "Both have priority 10; its score, 3, is the lowest of these."),
        (
            "block",
            [(3, 3.0), (4, 4.0), (5, 5.0)],
            "All 3 have priority 10; its score, 3, is the lowest of these.",
        ),
        ("slot", [(2, 0.0), (4, 0.0)], "It was chosen; what is on record does not say why."),
    ],
)
def test_under_priority_the_choice_is_explained_by_urgency_first(
    need: str, candidates: list[tuple[int, float]], words: str
) -> None:
    event = preempt(candidates=candidates, need=need)
    (one,) = make_decisions_view(decide(event, policy="priority")).preemptions
    assert one.why_it == words


def test_of_the_least_urgent_with_the_lowest_score_the_latest_arrival_goes() -> None:
    event = preempt(candidates=[(1, 0.0), (3, 3.0), (4, 3.0), (5, 3.5)], seq_id=4)
    (one,) = make_decisions_view(decide(event, policy="priority")).preemptions
    assert one.why_it == (
        "The 3 least urgent of 4 have priority 10; 2 of these have the lowest score, 3, and it arrived last."
    )


@pytest.mark.parametrize(
    ("need", "beneficiary", "words"),
    [
        ("block", 1, "so that 1, which runs and needed a block, can go on. "),
        ("block", 3, "It needed a block itself, and was the one to give way. "),
        (
            "slot",
            1,
            "gave its slot and its blocks up so that 1, which waits and is more urgent, gets a slot. ",
        ),
        ("room", 1, "It gave its blocks up so that 1, which waits and is more urgent, gets its blocks. "),
        ("", 1, "It gave its blocks up for 1. "),
        ("", 3, "It needed blocks itself, and was the one to give way. "),
    ],
)
def test_what_a_preemption_was_for_is_said(need: str, beneficiary: int, words: str) -> None:
    assert words in to_text(render(decide(preempt(need=need, beneficiary=beneficiary))))


def test_who_could_be_taken_is_said_by_the_policy_in_force_and_only_where_somebody_was() -> None:
    assert "by priority only" not in to_text(render(decide(preempt())))
    assert "by priority only less urgent ones" in to_text(render(decide(preempt(), policy="priority")))
    assert "Candidates are" not in to_text(render(decide(Admitted(2, 0, 40, 16, resumed=False))))


@pytest.mark.parametrize(
    ("event", "config", "words"),
    [
        ({}, {}, "there is no host tier to copy to"),
        ({}, {"preemption_mode": "recompute", "num_host_blocks": 4}, "recomputing is what the mode"),
        ({"recompute_ns": 1e6, "swap_ns": 2e6}, {"num_host_blocks": 4}, "computing again was reckoned"),
        ({"recompute_ns": 2e6, "swap_ns": 1e6}, {"num_host_blocks": 4}, "no block was full, or the host"),
        ({"recompute_ns": 2e6, "swap_ns": 1e6, "num_tokens_kept": 4}, {}, "copying was reckoned cheaper"),
        ({"num_tokens_kept": 4}, {}, "neither way has been measured"),
        (
            {"num_tokens_kept": 4},
            {"preemption_mode": "swap", "num_host_blocks": 4},
            "swapping is what the mode",
        ),
    ],
)
def test_the_mode_is_explained(event: dict[str, Any], config: dict[str, Any], words: str) -> None:
    (one,) = make_decisions_view(decide(preempt(**event), **config)).preemptions
    assert one.why_mode.startswith(words)


def test_costs_that_were_not_reckoned_are_not_made_up() -> None:
    (one,) = make_decisions_view(decide(preempt(recompute_ns=2_345_678.0))).preemptions
    assert (one.recompute_cost, one.swap_cost) == ("2.35 ms", NO_VALUE)


@pytest.mark.parametrize(
    ("miss", "words"),
    [
        (None, "all that can be was there"),
        (
            PrefixMiss("evicted", 16, 12, "q-1"),
            "the next block, from token 16 on, was evicted at step 12 for request q-1",
        ),
        (PrefixMiss("differs", 21, 0, "q-1"), "differs at token 21 from what was cached by request q-1"),
        (PrefixMiss("new", 0), "from token 0 on nothing like it was cached"),
    ],
)
def test_what_the_prefix_cache_lacked_is_said(miss: PrefixMiss | None, words: str) -> None:
    text = to_text(render(decide(Admitted(2, 0, 40, 16, resumed=False, miss=miss))))
    assert words in text


def test_a_change_of_policies_holds_for_the_step_itself() -> None:
    found = decide(
        Policies("priority", "oldest-first", "recompute"),
        preempt(),
        num_host_blocks=4,
        preemption_mode="swap",
    )
    view = make_decisions_view(found)
    assert view.policies.policy == "priority"
    assert view.preemptions[0].why_mode.startswith("recomputing is what the mode")
    assert view.others == [(None, "Policies changed: order priority, victim oldest-first, mode recompute")]


def test_loads_and_stalls_are_told_too() -> None:
    found = decide(Loaded(2, 0, 8, 2, 3, waited=True, is_orphan=True), Stalled(1, 0, 4, 1))
    text = to_text(render(found))
    assert "2: 2 blocks came back from the host tier in 3 steps; a step waited for it" in text
    assert "was ended with an error, because nothing could go on" in text


def test_links_lead_with_preemptions_and_tell_the_two_kinds_apart() -> None:
    found = decide(
        Admitted(2, 0, 40, 16, resumed=True),
        preempt(),
        preempt(seq_id=4, num_tokens_kept=8),
        Policies("fcfs", "oldest-first", "auto"),
        Arrived(6, "r6", 0, 4, 4, 1),
    )
    links = list_links(found)
    assert [(link.kind, link.sign) for link in links] == [
        ("recompute", "▼"),
        ("swap", "⇅"),
        ("admit", "+"),
        ("policies", "⚙"),
    ]
    assert len({link.key for link in links}) == 4
    assert links[2].words == "resumed, 16 of 40 tokens found"


def test_who_is_not_known_any_more_is_a_number() -> None:
    found = decide(preempt(beneficiary=77))
    assert make_decisions_view(found).preemptions[0].beneficiary.name == "sequence 77"
    assert "sequence 77" in to_text(render(found))


def test_names_are_escaped_in_the_drawer() -> None:
    before = EngineSnapshot(EngineConfig())
    arrival = Arrived(1, '"><script>x</script>', 0, 4, 4, 1)
    html = render(make_decisions(before, make_record(step=1, events=[arrival, preempt(seq_id=1)])))
    assert "<script>" not in html


def test_the_log_keeps_the_newest_and_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.realtime.decisions.MAX_KEPT_STEPS", 20)
    log = DecisionLog()
    snapshot: EngineSnapshot | None = None
    told: list[int] = []
    for core, result in random_run(3, 200):
        snapshot = snapshot or EngineSnapshot(core.config)
        log.note(snapshot, result.record)
        snapshot.apply(result.record)
        if any(isinstance(event, Preempted | Admitted) for event in result.record.events):
            told.append(result.record.step)
    assert [step for step in told if log.find(step)] == told[-20:]
    newest = list_newest(log.newest_preemptions(4))
    assert [link.step for link in newest] == sorted((link.step for link in newest), reverse=True)


def test_the_log_is_bounded_by_candidates_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.realtime.decisions.MAX_KEPT_CANDIDATES", 5)
    log = DecisionLog()
    before = EngineSnapshot(make_config())
    for step in range(1, 5):
        log.note(before, make_record(step=step, events=[preempt()]))
    assert [step for step in range(1, 5) if log.find(step)] == [3, 4]


def render(found: StepDecisions, *, in_drawer: bool = True) -> str:
    template = make_environment().get_template("partials/_decisions.html")
    return template.render(
        view=make_decisions_view(found),
        problem="",
        step=found.step,
        base="/s/x",
        session_id="x",
        earlier=None,
        later=7,
        in_drawer=in_drawer,
    )


def to_text(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "", html)).strip()
