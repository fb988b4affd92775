"""Steps over a paged cache without a model: who computes what in which blocks, and a cache to go with it."""

import random

import numpy as np
import torch

from engine.model.attention import KVCache
from engine.model.step import StepInputs
from engine.runner.batch import find_slots, lay_out

NO_BLOCK = 1_000_000
"""In tables beyond a sequence's own blocks; reading it fails."""


def make_step(spans: list[tuple[int, int]], block_size: int, num_blocks: int) -> StepInputs:
    """Return a step of (first position, tokens) for each sequence, in blocks of any order."""
    rows = lay_out(spans)
    width = -(-int(rows.contexts.max()) // block_size)
    blocks = random.Random(0).sample(range(num_blocks), num_blocks)
    tables = np.full((len(spans), width), NO_BLOCK, np.int32)
    for index, context in enumerate(rows.contexts.tolist()):
        needed = -(-context // block_size)
        tables[index, :needed] = [blocks.pop() for _ in range(needed)]
    return StepInputs(
        input_ids=np.zeros(len(rows.positions), np.int32),
        positions=rows.positions,
        slot_mapping=find_slots(tables[rows.sequences, rows.positions // block_size], rows, block_size),
        query_starts=rows.starts,
        context_lens=rows.contexts,
        block_tables=tables,
        logits_rows=rows.starts[1:] - np.int32(1),
        num_decodes=int((rows.counts == 1).sum()),
        block_size=block_size,
    )


def fill_cache(
    inputs: StepInputs, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> KVCache:
    """Return a cache of one layer with numbers where a sequence has tokens, and NaN elsewhere."""
    generator = torch.Generator().manual_seed(1)
    cache = KVCache(1, shape, dtype, device)
    cache.storage.fill_(torch.nan)
    block_size = inputs.block_size
    for index, context in enumerate(inputs.context_lens.tolist()):
        for block_index in range(-(-context // block_size)):
            filled = min(block_size, context - block_index * block_size)
            numbers = torch.randn(1, 2, filled, *shape[2:], generator=generator)
            block = int(inputs.block_tables[index, block_index])
            cache.storage[:, :, block, :filled] = numbers.to(device, dtype)
    return cache


def attend_in_float64(query: torch.Tensor, inputs: StepInputs, cache: KVCache) -> torch.Tensor:
    """Return attention (tokens, heads * head_dim) of query (tokens, heads, head_dim), as float64."""
    output = torch.empty(query.shape, dtype=torch.float64, device=query.device)
    repeat = query.shape[1] // cache.keys[0].shape[2]
    for index, context in enumerate(inputs.context_lens.tolist()):
        start, end = inputs.query_starts[index : index + 2].tolist()
        blocks = inputs.block_tables[index, : -(-context // inputs.block_size)].tolist()
        key, value = (
            part[0][blocks].flatten(0, 1)[:context].double().repeat_interleave(repeat, 1)
            for part in (cache.keys, cache.values)
        )
        scores = torch.einsum("qhd,khd->hqk", query[start:end].double(), key) / query.shape[2] ** 0.5
        last = torch.arange(context - (end - start), context, device=query.device)
        hidden = torch.arange(context, device=query.device) > last[:, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        output[start:end] = torch.einsum("hqk,khd->qhd", weights, value)
    return output.flatten(1)
