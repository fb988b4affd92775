"""Attention by torch's `varlen_attn` on a GPU: against float64, and replayed from a CUDA graph."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.engine_info import EngineInfo
from engine.model.step import ForwardBatch, to_device
from engine.model.varlen_attention import VarlenAttention
from engine.runner.attention_choice import VARLEN_PAGE_TOKENS, find_varlen_obstacle
from engine.runner.torch_facts import find_attention_facts
from tests.device.machine import IS_CUDA
from tests.support.paged_steps import attend_in_float64, fill_cache, make_step

CUDA = torch.device("cuda")
NUM_BLOCKS, HEADS, KV_HEADS = 40, 8, 2
INFO = EngineInfo(device="cuda", kernels="torch", dtype="bf16", kv_dtype="bf16", threads=0)
SIZES: Any = SimpleNamespace(head_dim=64, num_heads=HEADS, num_kv_heads=KV_HEADS)


def find_obstacle() -> str | None:
    """Return why this cannot be tested here."""
    if not IS_CUDA:
        return "needs a CUDA device"
    return find_varlen_obstacle(find_attention_facts(INFO, SIZES, VARLEN_PAGE_TOKENS))


OBSTACLE = find_obstacle()
pytestmark = pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))


def make_queries(num_tokens: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows of stacked heads, as the operations before give them: not contiguous."""
    rows = torch.randn(num_tokens, HEADS + 2 * KV_HEADS, head_dim, generator=torch.Generator().manual_seed(2))
    return rows.to(CUDA, dtype)[:, :HEADS]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)], ids=["bf16", "fp16"]
)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(
    "spans",
    [
        [(0, 1), (9, 1), (255, 1), (256, 1), (600, 1), (3000, 1)],
        [(0, 7), (250, 10), (300, 255), (2000, 500)],
        [(0, 1), (511, 1), (0, 300), (255, 2), (1000, 130)],
    ],
    ids=["decode", "chunks", "mixed"],
)
@torch.inference_mode()
def test_attention_is_that_of_float64(
    spans: list[tuple[int, int]], head_dim: int, dtype: torch.dtype, tolerance: float
) -> None:
    inputs = make_step(spans, VARLEN_PAGE_TOKENS, NUM_BLOCKS)
    cache = fill_cache(inputs, (NUM_BLOCKS, VARLEN_PAGE_TOKENS, KV_HEADS, head_dim), dtype, CUDA)
    query = make_queries(len(inputs.input_ids), head_dim, dtype)
    attention, batch = VarlenAttention(), to_device(inputs, CUDA)
    batch.plan = attention.plan(inputs, batch)
    attended = attention.attend(query, (query, query), (cache.keys[0], cache.values[0]), batch)
    expected = attend_in_float64(query, inputs, cache)
    torch.testing.assert_close(attended.double(), expected, atol=tolerance, rtol=tolerance)


@torch.inference_mode()
def test_a_captured_step_follows_its_tensors() -> None:
    """As decode steps do: other contexts, other blocks, and rows that belong to nobody."""
    num_rows, width, dtype = 4, 8, torch.bfloat16
    batch = ForwardBatch(
        input_ids=torch.zeros(num_rows, dtype=torch.int32, device=CUDA),
        positions=torch.zeros(num_rows, dtype=torch.int32, device=CUDA),
        slot_mapping=torch.zeros(num_rows, dtype=torch.int32, device=CUDA),
        query_starts=torch.arange(num_rows + 1, dtype=torch.int32, device=CUDA),
        context_lens=torch.ones(num_rows, dtype=torch.int32, device=CUDA),
        block_tables=torch.zeros((num_rows, width), dtype=torch.int32, device=CUDA),
        logits_rows=torch.arange(num_rows, dtype=torch.int32, device=CUDA),
        num_decodes=num_rows,
        max_query_len=1,
        max_context_len=width * VARLEN_PAGE_TOKENS,
        has_padding=True,
    )
    steps = [
        make_step(spans, VARLEN_PAGE_TOKENS, NUM_BLOCKS) for spans in ([(5, 1)] * 4, [(9, 1), (1500, 1)])
    ]
    caches = [fill_cache(step, (NUM_BLOCKS, VARLEN_PAGE_TOKENS, KV_HEADS, 64), dtype, CUDA) for step in steps]
    keys, values = caches[0].keys[0], caches[0].values[0]
    query = make_queries(num_rows, 64, dtype)
    attention = VarlenAttention()

    def work() -> torch.Tensor:
        batch.plan = None
        return attention.attend(query, (query, query), (keys, values), batch)

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's own
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attended = work()
    for step, cache in zip(steps, caches, strict=True):
        num_seqs = step.num_sequences
        batch.context_lens.zero_()
        batch.context_lens[:num_seqs].copy_(torch.from_numpy(step.context_lens))
        batch.block_tables[:num_seqs, : step.block_tables.shape[1]].copy_(torch.from_numpy(step.block_tables))
        keys.copy_(cache.keys[0])
        values.copy_(cache.values[0])
        graph.replay()
        expected = attend_in_float64(query[:num_seqs], step, cache)
        torch.testing.assert_close(attended[:num_seqs].double(), expected, atol=2e-2, rtol=2e-2)
