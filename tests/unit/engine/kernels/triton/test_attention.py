"""The attention backend: steps of single tokens and chunks, and which models it says that it can serve."""

import pytest
import torch

from engine.kernels.triton.attention import TritonAttention, supports
from engine.kernels.triton.device_limits import IS_INTERPRETED
from engine.model.attention import AttentionBackend
from tests.support.attention_reference import TOLERANCE, AttentionCase, AttentionShape, make_case

SINGLE = [(1, 1), (16, 1), (300, 1)]
CHUNKS = [(5, 5), (60, 60), (40, 17)]


def check(case: AttentionCase, window: int = 0) -> None:
    backend: AttentionBackend = TritonAttention(window)
    case.batch.plan = backend.plan(case.inputs, case.batch)
    attended = backend.attend(case.query, case.new, case.cache, case.batch)
    tolerance = TOLERANCE[case.query.dtype]
    torch.testing.assert_close(attended.double(), case.expected(window), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("sequences", [SINGLE, CHUNKS, SINGLE + CHUNKS, [(9, 1), (2, 2)]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 25])
def test_attention_of_any_step_equals_float64(
    sequences: list[tuple[int, int]], dtype: torch.dtype, window: int, device: str
) -> None:
    check(make_case(AttentionShape(32, 3), sequences, dtype, device), window)


def test_padding_of_a_captured_step_gives_zeros(device: str) -> None:
    check(make_case(AttentionShape(32, 3), SINGLE, torch.float32, device).with_padding(5))


def test_queries_may_lie_between_keys_and_values(device: str) -> None:
    case = make_case(AttentionShape(32, 2), SINGLE + CHUNKS, torch.float32, device)
    case.query = torch.cat((case.query, *case.new), 1)[:, :4]
    check(case)


def test_heads_in_another_order_than_tokens_are_put_right(device: str) -> None:
    case = make_case(AttentionShape(32, 2), SINGLE + CHUNKS, torch.float32, device)
    case.query = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    check(case)


def test_only_the_tensors_of_a_batch_count_as_a_graph_replays_it(device: str) -> None:
    case = make_case(AttentionShape(16, 2), [(30, 1), (300, 1)], torch.float32, device)
    other = make_case(AttentionShape(16, 2), [(290, 1), (17, 1)], torch.float32, device, seed=1)
    case.batch.context_lens.copy_(other.batch.context_lens)
    width = other.batch.block_tables.shape[1]
    case.batch.block_tables[:, :width].copy_(other.batch.block_tables[:, : case.batch.block_tables.shape[1]])
    case.query, case.cache, case.slots = other.query, other.cache, other.slots
    check(case)


@pytest.mark.skipif(not IS_INTERPRETED, reason="asks for the CPU")
@pytest.mark.parametrize(
    ("head_dim", "dtype", "group", "reason"),
    [
        (128, torch.bfloat16, 8, None),
        (24, torch.float32, 1, None),
        (80, torch.float16, 3, None),
        (128, torch.float64, 8, "dtype float64"),
        (128, torch.float8_e4m3fn, 8, "dtype float8_e4m3fn"),
        (8, torch.float32, 8, "head_dim 8"),
        (36, torch.float32, 8, "head_dim 36"),
        (512, torch.bfloat16, 8, "head_dim 512"),
        (128, torch.bfloat16, 65, "65 query heads"),
    ],
)
def test_what_cannot_be_served_is_named(
    head_dim: int, dtype: torch.dtype, group: int, reason: str | None
) -> None:
    said = supports(head_dim, dtype, group, torch.device("cpu"))
    assert said is None if reason is None else said is not None and said.startswith(reason)


@pytest.mark.parametrize(("capability", "can"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_old_gpus_are_refused(
    capability: tuple[int, int], can: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    said = supports(128, torch.bfloat16, 8, torch.device("cuda"))
    assert said is None if can else said == "the GPU has compute capability 7.5, the kernels need 8.0"


def test_the_cpu_is_refused_unless_it_interprets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.kernels.triton.attention.IS_INTERPRETED", False)
    assert supports(128, torch.bfloat16, 8, torch.device("cpu")) == "device cpu is not a GPU"
