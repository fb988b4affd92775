from pathlib import Path

import pytest

from bench.device.load import shortened
from bench.device.part import Clock, Options
from bench.device.peer import Peer, PeerRun, Setting, best_rate, settings_of, try_run
from bench.device.shapes import list_shapes

pytestmark = pytest.mark.unit


def test_the_best_rate_is_that_of_the_densest_stretch() -> None:
    times_s = [0.0, 1.0, 2.0, 2.1, 2.2, 2.3, 4.0, 9.0]
    assert best_rate(times_s, 1.0) == 4.0
    assert best_rate(times_s, 9.0) == pytest.approx(7 / 9)
    assert best_rate([1.0], 0.0) == 0.0


def test_a_run_without_a_token_has_figures_too() -> None:
    assert PeerRun().figures()["output_tok_s"] == 0.0


def test_figures_count_from_the_start_to_the_last_token() -> None:
    figures = PeerRun([1.0, 2.0, 4.0], is_complete=True).figures()
    assert (figures["output_tokens"], figures["seconds"], figures["output_tok_s"]) == (3, 4.0, 0.75)


@pytest.mark.filterwarnings("ignore")  # of transformers, about its own names
@pytest.mark.slow
def test_transformers_runs_all_requests_or_as_many_tokens_as_the_time_allows(tmp_path: Path) -> None:
    options = Options("cpu", is_tiny=True, json=tmp_path / "peer.json", limit_s=60)
    peer = Peer(options, list_shapes(is_tiny=True)["Llama-3.2-1B"])
    setting = settings_of(peer.load, is_cuda=False)[0]
    whole = peer.run(setting, peer.prompts, Clock(120))
    assert whole.is_complete
    assert len(whole.token_s) == sum(prompt.num_new for prompt in peer.prompts)
    cut = peer.run(Setting(2, uses_graphs=False), shortened(peer.prompts, 900), Clock(2))
    assert not cut.is_complete
    assert 0 < len(cut.token_s) < 900 * len(peer.prompts)
    assert cut.token_s == sorted(cut.token_s)
    peer.prompts = [shortened(peer.prompts, 4)[0]]
    peer.prompts[0].token_ids[0] = 10_000  # no such token
    failed = try_run(peer, setting, Clock(60))
    assert failed["output_tok_s"] == 0.0
    assert "error" in failed
