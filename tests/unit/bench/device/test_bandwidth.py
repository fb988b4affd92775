from pathlib import Path

import pytest
import torch

from bench.device import bandwidth
from bench.device.bandwidth import Kernel, make_batches, measure_decode, measure_prefill
from bench.device.ceilings import Ceilings
from bench.device.kernel_cases import Heads
from bench.device.part import Options
from tests.support.padded_attention import PaddedAttention

pytestmark = pytest.mark.unit

CEILINGS = Ceilings(copy_gb_s=1e-3, matmul_tflops=1e-3)


@pytest.fixture
def kernel() -> Kernel:
    keys = torch.randn(12, 16, 2, 16)
    return Kernel(PaddedAttention(), Heads(4, 2, 16), keys, keys.clone())


def make_options(folder: Path) -> Options:
    return Options("cpu", is_tiny=True, json=folder / "b.json", limit_s=10)


def test_batches_lie_in_different_blocks(kernel: Kernel) -> None:
    batches = make_batches(kernel, [(30, 1), (30, 1)], 3)
    blocks = torch.cat([batch.block_tables.flatten() for batch in batches]).tolist()
    assert sorted(blocks) == list(range(12))
    assert all(batch.context_lens.tolist() == [31, 31] for batch in batches)


def test_decode_counts_the_keys_and_values_that_are_read(
    kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bandwidth, "measure_s", lambda *_args, **_kwargs: 1e-3)
    row = measure_decode(kernel, 3, 40, make_options(tmp_path), CEILINGS)
    assert row is not None
    assert row["gb_s"] == pytest.approx(3 * 40 * 2 * 2 * 16 * 4 / 1e-3 / 1e9)
    assert row["percent_of_copy"] == pytest.approx(100 * row["gb_s"] / 1e-3)


def test_what_the_pool_does_not_hold_is_left_out(kernel: Kernel, tmp_path: Path) -> None:
    assert measure_decode(kernel, 4, 64, make_options(tmp_path), CEILINGS) is None


def test_prefill_counts_the_pairs_that_see_each_other(
    kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bandwidth, "measure_s", lambda *_args, **_kwargs: 1e-3)
    row = measure_prefill(kernel, 0, 16, make_options(tmp_path), CEILINGS)
    assert row["tflops"] == pytest.approx(4 * 4 * 16 * (16 * 17 / 2) / 1e-3 / 1e12)
    assert row["sdpa_tflops"] == row["tflops"]
    chunk = measure_prefill(kernel, 16, 4, make_options(tmp_path), CEILINGS)
    assert chunk["tflops"] == pytest.approx(4 * 4 * 16 * (4 * 16 + 10) / 1e-3 / 1e12)
    assert "sdpa_tflops" not in chunk
