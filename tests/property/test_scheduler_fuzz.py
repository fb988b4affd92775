"""Whatever is asked of an engine, in whatever order: its books add up, it advances, its answers are right.

A failure is shrunk and printed as a `Scenario`; `make fuzz` looks for hours.
"""

from tests.support.fuzz import run_many

MUST_HAPPEN = {
    "abort of loading",
    "abort of preempted",
    "abort of running",
    "abort of waiting",
    "all at once",
    "displaced",
    "error of running",
    "evictions",
    "hidden loads",
    "host hits",
    "interrupted",
    "lookahead",
    "lookahead unused",
    "miss: differs",
    "miss: evicted",
    "miss: new",
    "offloads",
    "orphan loads",
    "overdue loads",
    "prefix hits",
    "prefix pending",
    "recomputes",
    "resets",
    "resumed from the host tier",
    "stop of running",
    "swaps",
    "waited loads",
    "MAX_NUM_SEQS",
    "NO_FREE_BLOCKS",
    "Policies",
    "PREFIX_PENDING",
    "PROMPT_ENDS",
    "TOKEN_BUDGET",
    "WATERMARK",
}
"""Checked, so that the test keeps testing what it says."""


def test_random_lives_keep_every_promise() -> None:
    tally = run_many(170, 260) + run_many(80, 260, has_slow_copies=True)
    assert tally["requests"] >= 10_000
    assert not {what for what in MUST_HAPPEN if not tally[what]}
