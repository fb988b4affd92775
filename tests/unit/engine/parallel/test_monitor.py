"""What counts as the loss of a rank, with processes that do as the test says."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.errors import RankError
from engine.parallel import process
from engine.parallel.messages import Stage
from engine.parallel.monitor import TICK_S, Limits, Monitor
from engine.parallel.process import RankProcess
from engine.parallel.running import kill_ranks, running
from tests.support.ranks import is_running

TIMEOUT_S = 30.0
PATIENT = Limits(silence_s=TIMEOUT_S, step_s=TIMEOUT_S, load_s=TIMEOUT_S)


class Ranks:
    """Two watched ranks."""

    def __init__(self, limits: Limits) -> None:
        self.ranks = [RankProcess(rank) for rank in (1, 2)]
        self.losses = 0
        self.monitor = Monitor(self.ranks, limits, self._on_loss)

    def _on_loss(self) -> None:
        self.losses += 1

    def tell(self, action: str, value: Any = None) -> None:
        for rank in self.ranks:
            rank.send(json.dumps([action, value]).encode())

    def wait_for_loss(self) -> str:
        loss = self.monitor.wait_for_loss(TIMEOUT_S)
        assert loss is not None, "no loss was noticed in time"
        return loss


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr(process, "_MODULE", "tests.support.small_rank")

    @contextmanager
    def watch(limits: Limits = PATIENT, *, starts: bool = True) -> Iterator[Ranks]:
        ranks = Ranks(limits)
        try:
            if starts:
                ranks.monitor.start()
            yield ranks
        finally:
            ranks.monitor.close()
            for rank in ranks.ranks:
                rank.close()
            assert not any(is_running(rank.pid) for rank in ranks.ranks)

    return watch


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def pass_over() -> None:
    pass


def test_stages_are_waited_for_and_closing_is_no_loss(watched: Callable[..., Any]) -> None:
    with watched() as ranks:
        ranks.tell("report", {"stage": "loading", "share": 0.5})
        ranks.tell("report", {"stage": "loaded", "share": 1.0})
        ranks.monitor.wait_for_stage(Stage.LOADED, pass_over)
        ranks.tell("report", {"stage": "ready"})
        ranks.monitor.wait_for_stage(Stage.READY, pass_over)
        ranks.monitor.wait_for_stage(Stage.LOADED, pass_over)
    assert (ranks.monitor.loss, ranks.losses) == (None, 0)


def test_whoever_waits_may_give_up(watched: Callable[..., Any]) -> None:
    def give_up() -> None:
        raise InterruptedError

    with watched() as ranks, pytest.raises(InterruptedError):
        ranks.monitor.wait_for_stage(Stage.LOADED, give_up)


def test_the_end_of_a_process_ends_the_others_and_is_named(watched: Callable[..., Any]) -> None:
    with watched() as ranks:
        ranks.tell("report", {"stage": "ready"})
        ranks.monitor.wait_for_stage(Stage.READY, pass_over)
        os.kill(ranks.ranks[1].pid, signal.SIGKILL)
        assert ranks.wait_for_loss() == (
            "Rank 2 of 3 failed: it was ended by SIGKILL (the system does that when memory runs out)."
        )
        until(lambda: not is_running(ranks.ranks[0].pid))
        until(lambda: ranks.losses == 1)
        with pytest.raises(RankError, match="SIGKILL"):
            ranks.monitor.wait_for_stage(Stage.READY, pass_over)


def test_all_ranks_can_be_ended_without_waiting_also_one_that_is_stopped(
    watched: Callable[..., Any],
) -> None:
    with watched(starts=False) as ranks:
        os.kill(ranks.ranks[0].pid, signal.SIGSTOP)
        kill_ranks()
        until(lambda: not any(is_running(rank.pid) for rank in ranks.ranks))
    assert not any(rank._process in running for rank in ranks.ranks)


def test_an_exit_code_is_told(watched: Callable[..., Any]) -> None:
    with watched() as ranks:
        ranks.ranks[0].send(b'["exit", 3]')
        assert ranks.wait_for_loss() == "Rank 1 of 3 failed: it ended with code 3."


def test_what_a_rank_says_of_its_failure_is_the_reason(watched: Callable[..., Any]) -> None:
    with watched() as ranks:
        report = {"stage": "failed", "message": "model.gguf: cannot read the model file (No such file)."}
        ranks.ranks[0].send(json.dumps(["report", report]).encode())
        with pytest.raises(RankError) as caught:
            ranks.monitor.wait_for_stage(Stage.LOADED, pass_over)
    assert str(caught.value) == ("Rank 1 of 3 failed: model.gguf: cannot read the model file (No such file).")


def test_a_ready_rank_that_falls_silent_is_lost_and_one_that_beats_is_not(
    watched: Callable[..., Any],
) -> None:
    with watched(Limits(silence_s=2.0)) as ranks:
        ranks.tell("report", {"stage": "ready"})
        ranks.monitor.wait_for_stage(Stage.READY, pass_over)
        ranks.tell("beat", 0.05)
        heard_s = [rank.heard_s for rank in ranks.ranks]
        until(
            lambda: all(
                rank.heard_s > before + 1.0 for rank, before in zip(ranks.ranks, heard_s, strict=True)
            )
        )
        assert ranks.monitor.loss is None
        os.kill(ranks.ranks[0].pid, signal.SIGSTOP)
        assert ranks.wait_for_loss() == (
            "Rank 1 of 3 failed: it is ready, and there was no sign of life for 2 s."
        )
        until(lambda: not any(is_running(rank.pid) for rank in ranks.ranks))


def test_a_rank_that_does_not_get_on_with_loading_is_lost_though_it_beats(
    watched: Callable[..., Any],
) -> None:
    with watched(Limits(load_s=0.6)) as ranks:
        ranks.tell("report", {"stage": "loading", "share": 0.3})
        ranks.tell("beat", 0.05)
        assert "it is loading, and there was no sign of life for 0.6 s" in ranks.wait_for_loss()


def test_a_step_that_does_not_end_is_a_loss_and_one_that_ends_is_not(watched: Callable[..., Any]) -> None:
    with watched() as ranks:
        for _ in range(3):
            ranks.monitor.begin_step(0.3)
            ranks.monitor.end_step()
        assert ranks.monitor.wait_for_loss(0.6) is None
        ranks.monitor.begin_step(0.3)
        assert ranks.wait_for_loss() == "A step of 3 ranks has not ended within 0.3 s."


def test_time_in_which_this_process_did_not_run_counts_for_nobody(watched: Callable[..., Any]) -> None:
    with watched(Limits(silence_s=5, step_s=5, load_s=5), starts=False) as ranks:
        monitor = ranks.monitor
        monitor.begin_step(5)
        for clock in ("_ticked_s", "_step_since_s"):
            setattr(monitor, clock, getattr(monitor, clock) - 60)
        for rank in ranks.ranks:
            rank.heard_s -= 60
        monitor._look_at_clocks()
        monitor._look_at_clocks()
        assert monitor.loss is None, "all were stopped together"
        monitor._step_since_s = time.monotonic() - 60
        monitor._look_at_clocks()
        assert monitor.loss == "A step of 3 ranks has not ended within 5 s."


def test_the_times_are_those_that_are_stated() -> None:
    text = (Path(__file__).parents[4] / "docs" / "parallel.md").read_text()
    limits = Limits()
    for words in (
        f"without a sign of life | after {limits.silence_s:g} seconds | end with an error within 6 seconds",
        f"though all ranks are alive | after {limits.step_s:g} seconds",
        f"with starting or loading | after {limits.load_s:g} seconds",
    ):
        assert words in text
    assert limits.silence_s + 2 * TICK_S < 6


def test_reports_that_cannot_be_read_are_a_loss(
    watched: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with watched() as ranks:
        ranks.tell("report", {"stage": "no such stage"})
        assert ranks.wait_for_loss() == "The ranks cannot be watched any more."
    assert "no such stage" in caplog.text


def test_only_the_first_reason_counts(watched: Callable[..., Any]) -> None:
    with watched() as ranks:
        ranks.monitor.lose("first")
        ranks.monitor.lose("second")
        assert (ranks.monitor.loss, ranks.losses) == ("first", 1)
