"""The arguments that torch's `varlen_attn` gets, by a stand-in that checks them and computes on the CPU."""

import inspect

import numpy as np
import pytest
import torch

from engine.model.attention import KVCache
from engine.model.reference_attention import ReferenceAttention
from engine.model.step import ForwardBatch, StepInputs, to_device
from engine.model.varlen_attention import VarlenAttention, load_varlen_attn
from tests.support.paged_steps import NO_BLOCK, fill_cache, make_step
from tests.support.varlen_stand_in import VarlenStandIn

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS, HEADS, KV_HEADS, HEAD_DIM = 256, 12, 4, 2, 32
SHAPE = (NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM)


def attend(
    attention: VarlenAttention | ReferenceAttention, inputs: StepInputs, cache: KVCache
) -> torch.Tensor:
    torch.manual_seed(2)
    num_tokens = len(inputs.input_ids)
    # Rows of stacked heads, as the operations before give them: not contiguous.
    query = torch.randn(num_tokens, HEADS + KV_HEADS, HEAD_DIM).to(cache.storage.dtype)[:, :HEADS]
    flat = (cache.keys[0].flatten(0, 1), cache.values[0].flatten(0, 1))
    slots = torch.from_numpy(inputs.slot_mapping).long()
    batch = to_device(inputs, CPU)
    batch.plan = attention.plan(inputs, batch)
    return attention.attend(query, (flat[0][slots], flat[1][slots]), (cache.keys[0], cache.values[0]), batch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("spans", "window"),
    [
        ([(0, 1), (9, 1), (255, 1), (256, 1), (600, 1)], (-1, -1)),
        ([(0, 7), (250, 10), (300, 255)], (-1, 0)),
        ([(0, 1), (511, 1), (0, 300), (255, 2)], (-1, 0)),
    ],
)
def test_attention_is_that_of_the_reference(
    dtype: torch.dtype, spans: list[tuple[int, int]], window: tuple[int, int]
) -> None:
    torch.set_num_threads(1)
    inputs, stand_in = make_step(spans, BLOCK_SIZE, NUM_BLOCKS), VarlenStandIn()
    cache = fill_cache(inputs, SHAPE, dtype, CPU)
    attended = attend(VarlenAttention(stand_in), inputs, cache)
    padded = np.where(inputs.block_tables == NO_BLOCK, inputs.block_tables[:, :1], inputs.block_tables)
    inputs.block_tables = padded
    reference = ReferenceAttention(CPU, dtype, KV_HEADS * HEAD_DIM * dtype.itemsize)
    expected = attend(reference, inputs, cache)
    torch.testing.assert_close(attended, expected, atol=2e-2, rtol=2e-2)
    assert attended.shape == (len(inputs.input_ids), HEADS * HEAD_DIM)
    assert stand_in.calls == [
        {
            "max_q": max(count for _, count in spans),
            "max_k": max(start + count for start, count in spans),
            "window_size": window,
            "num_splits": 1,  # torch 2.13 computes wrong numbers with more
        }
    ]


def test_a_padded_batch_without_a_plan_is_computed_from_its_tensors_alone() -> None:
    # As in a CUDA graph: the host knows no lengths, and rows at the end belong to nobody.
    inputs = make_step([(9, 1), (300, 1)], BLOCK_SIZE, NUM_BLOCKS)
    cache = fill_cache(inputs, SHAPE, torch.float16, CPU)
    attention = VarlenAttention(VarlenStandIn())
    expected = attend(attention, inputs, cache)
    tables = torch.full((3, 4), NO_BLOCK, dtype=torch.int32)
    tables[:2, :2] = torch.from_numpy(inputs.block_tables)
    batch = ForwardBatch(
        input_ids=torch.zeros(3, dtype=torch.int32),
        positions=torch.zeros(3, dtype=torch.int32),
        slot_mapping=torch.tensor([*inputs.slot_mapping.tolist(), -1], dtype=torch.int32),
        query_starts=torch.arange(4, dtype=torch.int32),
        context_lens=torch.tensor([10, 301, 0], dtype=torch.int32),
        block_tables=tables,
        logits_rows=torch.arange(3, dtype=torch.int32),
        num_decodes=3,
        max_query_len=1,
        max_context_len=1024,
        has_padding=True,
    )
    torch.manual_seed(2)
    query = torch.randn(2, HEADS + KV_HEADS, HEAD_DIM).half()[:, :HEADS]
    query = torch.cat((query, torch.full((1, HEADS, HEAD_DIM), torch.nan).half()))
    for _ in range(2):  # every layer uses the plan that the first one has made
        attended = attention.attend(query, (query, query), (cache.keys[0], cache.values[0]), batch)
        torch.testing.assert_close(attended[:2], expected, atol=0, rtol=0)
    assert isinstance(batch.plan, torch.Tensor)
    assert batch.plan.tolist() == [0, 10, 311, 311]


def test_torch_still_takes_what_the_stand_in_takes() -> None:
    theirs = inspect.signature(load_varlen_attn()).parameters
    if "block_table" not in theirs:
        pytest.skip("this torch takes no block tables")
    ours = inspect.signature(VarlenStandIn.__call__).parameters
    for name, parameter in list(ours.items())[1:]:
        assert theirs[name].kind == parameter.kind
    positional = [
        name for name, parameter in theirs.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    assert positional == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
