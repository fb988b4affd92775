from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from bench.device import float64, kernels
from bench.device.kernel_cases import TOLERANCES, AttentionCase, Case, Heads
from bench.device.kernel_grid import NormCase, RotateCase, SiluCase, list_cases
from engine.model.decoder import Arithmetic
from engine.model.layer_ops import TorchOps
from engine.model.step import ForwardBatch
from tests.support.padded_attention import PaddedAttention

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
HEADS = Heads(4, 2, 16)
MIXED = AttentionCase("mixed", "float32", HEADS, ((3, 1), (20, 1), (0, 5), (17, 3)))
PADDED = AttentionCase("padded", "float32", HEADS, ((0, 1), (33, 1)), num_padding=3)
ROTATE = RotateCase("float32", HEADS, 21, has_norms=True)
RIGHT = Arithmetic(PaddedAttention(), TorchOps())


def error_of(case: Case, arithmetic: Arithmetic = RIGHT) -> float:
    with torch.inference_mode():
        return case.run(arithmetic.attention, arithmetic.ops, CPU)


@pytest.mark.parametrize("case", [
    MIXED, PADDED, ROTATE, NormCase("float32", 3, 48, is_added=True), SiluCase("float32", 3, 48),
], ids=lambda case: case.name)  # fmt: skip
def test_plain_torch_is_right(case: Case) -> None:
    assert error_of(case) <= TOLERANCES["float32"] / 10


class Wrong(PaddedAttention):
    """Attention over a batch that was changed before."""

    def __init__(self, change: Callable[[ForwardBatch], None]) -> None:
        self._change = change

    def attend(
        self, query: Tensor, new: tuple[Tensor, Tensor], cache: tuple[Tensor, Tensor], batch: ForwardBatch
    ) -> Tensor:
        self._change(batch)
        return super().attend(query, new, cache, batch)


def forget_a_token(batch: ForwardBatch) -> None:
    batch.context_lens[1] -= 1


def take_the_block_of_another(batch: ForwardBatch) -> None:
    batch.block_tables[1, 0] = batch.block_tables[0, 0]


def read_too_far(batch: ForwardBatch) -> None:
    batch.context_lens[0] += 1


@pytest.mark.parametrize("case", [MIXED, PADDED], ids=lambda case: case.title)
@pytest.mark.parametrize("change", [forget_a_token, take_the_block_of_another, read_too_far])
def test_attention_that_reads_anything_else_is_wrong(
    case: AttentionCase, change: Callable[[ForwardBatch], None]
) -> None:
    error = error_of(case, Arithmetic(Wrong(change)))
    assert error > TOLERANCES["bfloat16"]
    assert (error == float("inf")) == (change is not forget_a_token)


class Misplacing(TorchOps):
    """Stores the first row's keys in one slot more."""

    def rotate_and_store(self, *arguments: object, **named: object) -> tuple[Tensor, Tensor, Tensor]:
        found = super().rotate_and_store(*arguments, **named)  # type: ignore[arg-type]
        cache = arguments[4]
        assert isinstance(cache, tuple)
        slots = cache[0].flatten(0, 1)
        empty = slots.isnan().flatten(1).all(1).nonzero()[0]
        slots[empty] = found[1][0]
        return found


def test_storing_where_nothing_belongs_is_wrong() -> None:
    assert error_of(ROTATE, Arithmetic(PaddedAttention(), Misplacing())) == float("inf")


def test_an_error_is_measured_by_the_row_and_head() -> None:
    expected = torch.ones(4, 3, 8, dtype=torch.float64)
    expected[0] *= 1000
    found = expected.clone()
    found[1, 2, 5] += 0.25
    found[0, 0, 0] += 1
    assert float64.largest_error(found, expected) == 0.25
    found[3, 0, 0] = torch.nan
    assert float64.largest_error(found, expected) == float("inf")


def test_a_case_that_raises_is_wrong_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "make_arithmetic", lambda *_: Arithmetic(PaddedAttention(), TorchOps()))
    assert kernels.run_case(MIXED, CPU)["is_right"]

    def fail(_batch: ForwardBatch) -> None:
        raise ValueError("no such\nlayout")

    monkeypatch.setattr(kernels, "make_arithmetic", lambda *_: Arithmetic(Wrong(fail), TorchOps()))
    assert kernels.run_case(MIXED, CPU) == {"is_right": False, "fault": "ValueError: no such layout"}
    monkeypatch.setattr(kernels, "make_arithmetic", lambda *_: Arithmetic(Wrong(read_too_far), TorchOps()))
    assert kernels.run_case(MIXED, CPU) == {"is_right": False, "error": "not finite"}


def test_a_case_that_breaks_the_device_says_that_it_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_batch: ForwardBatch) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(kernels, "make_arithmetic", lambda *_: Arithmetic(Wrong(fail), TorchOps()))
    result = kernels.run_case(MIXED, CPU)
    assert (result["is_right"], result["is_lost"]) == (False, True)
    assert "illegal memory access" in result["fault"]


def test_the_grid_has_every_shape_once() -> None:
    cases = list_cases(is_tiny=False)
    assert len({case.name for case in cases}) == len(cases)
    attention = [case for case in cases if isinstance(case, AttentionCase)]
    for dtype in ("bfloat16", "float16", "float32"):
        shapes = {case.heads for case in attention if case.dtype == dtype}
        assert {heads.head_dim for heads in shapes} >= {64, 80, 128}
        assert {case.title for case in attention if case.dtype == dtype} >= {"chunks", "padded decode"}
    assert {case.heads.head_dim for case in attention} == {64, 80, 96, 128, 256}
    assert {case.block_size for case in attention} == {1, 8, 16, 32, 64, 256}
    assert max(before + count for case in attention for before, count in case.spans) == 8192
    # Single tokens come first, as in every step.
    for case in attention:
        assert all(one[1] == 1 or other[1] > 1 for one, other in pairwise(case.spans)), case.title
