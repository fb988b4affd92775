"""How close the attention kernels come to the device's ceilings.

Decode: bytes of keys and values per second by batch and context, as a share of the bandwidth of a copy.
Short cases run over several batches in turn whose keys and values do not fit into the cache together.
Prefill: operations per second by length, as a share of the rate of a product, beside what torch's own
attention needs for the same without pages. All are replayed as CUDA graphs, so that the interpreter takes no
time between kernels.
"""

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from bench.device.ceilings import Ceilings, ceilings_of
from bench.device.kernel_cases import Heads
from bench.device.part import Clock, Findings, Options, parse
from bench.device.shapes import QWEN3_06B, list_shapes
from bench.device.timing import as_graph, measure_s
from engine.model.attention import AttentionBackend
from engine.model.config import ModelConfig
from engine.model.step import ForwardBatch, StepInputs, to_device
from engine.runner.arithmetic import make_arithmetic
from engine.runner.attention_choice import TRITON
from engine.runner.batch import find_slots, lay_out

_BLOCK_SIZE = 16
_BATCHES, _CONTEXTS = (1, 8, 64, 256), (512, 2048, 8192, 32_768)
_TINY_BATCHES, _TINY_CONTEXTS = (1, 3), (20, 40)
_CHUNKS = ((0, 1024), (0, 2048), (0, 4096), (0, 8192), (0, 16_384), (14_336, 2048))
_TINY_CHUNKS = ((0, 16), (16, 8))
_OUTSIDE_CACHE_BYTES = 512 << 20
_MAX_TURNS = 64
_FILLED_BLOCKS = 1 << 14
"""At a time: less than 2^31 numbers, whatever the shape."""

_POOL_SHARE = 0.6
"""Of the free memory: cases that need more are left out."""


@dataclass(frozen=True)
class Kernel:
    """The attention that is measured, a pool for it, and its heads."""

    attention: AttentionBackend
    heads: Heads
    keys: Tensor
    values: Tensor

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token."""
        return 2 * self.heads.num_kv_heads * self.heads.head_dim * self.keys.element_size()

    @property
    def num_tokens(self) -> int:
        """Tokens that fit into the pool."""
        return self.keys.shape[0] * _BLOCK_SIZE


def make_kernel(config: ModelConfig, options: Options, num_tokens: int) -> Kernel:
    """Return the kernel with a pool of so many tokens, or as many as fit into memory, of random numbers."""
    dtype = torch.bfloat16 if options.is_cuda else torch.float32
    heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
    if options.is_cuda:
        free_bytes = torch.cuda.mem_get_info()[0]
        num_tokens = min(num_tokens, int(_POOL_SHARE * free_bytes) // (2 * config.kv_size * dtype.itemsize))
    shape = (num_tokens // _BLOCK_SIZE, _BLOCK_SIZE, heads.num_kv_heads, heads.head_dim)
    keys, values = (torch.empty(shape, dtype=dtype, device=options.device) for _ in range(2))
    for pool in (keys, values):
        for part in torch.split(pool, _FILLED_BLOCKS):
            part.normal_()
    arithmetic = make_arithmetic(TRITON, QWEN3_06B, dtype, torch.device(options.device))
    return Kernel(arithmetic.attention, heads, keys, values)


def make_batches(kernel: Kernel, spans: list[tuple[int, int]], turns: int) -> list[ForwardBatch]:
    """Return batches of the same shape over different blocks, in no order."""
    rows = lay_out(spans)
    width = -(-int(rows.contexts.max()) // _BLOCK_SIZE)
    count = turns * len(spans) * width
    blocks = np.random.default_rng(0).permutation(kernel.keys.shape[0])[:count].astype(np.int32)
    batches = []
    for tables in blocks.reshape(turns, len(spans), width):
        inputs = StepInputs(
            input_ids=np.zeros_like(rows.positions),
            positions=rows.positions,
            slot_mapping=find_slots(tables[rows.sequences, rows.positions // _BLOCK_SIZE], rows, _BLOCK_SIZE),
            query_starts=rows.starts,
            context_lens=rows.contexts,
            block_tables=tables,
            logits_rows=rows.starts[1:] - np.int32(1),
            num_decodes=int((rows.counts == 1).sum()),
            block_size=_BLOCK_SIZE,
        )
        batch = to_device(inputs, kernel.keys.device)
        batch.plan = kernel.attention.plan(inputs, batch)
        batches.append(batch)
    return batches


def time_s(kernel: Kernel, batches: list[ForwardBatch], device: str) -> float:
    """Return the seconds of attention over one of the batches."""
    num_tokens = len(batches[0].positions)
    shape = (num_tokens, kernel.heads.num_heads, kernel.heads.head_dim)
    query = torch.randn(shape, device=device).to(kernel.keys.dtype)  # (tokens, heads, head_dim)
    new = kernel.keys.new_zeros((num_tokens, kernel.heads.num_kv_heads, kernel.heads.head_dim))

    def attend() -> None:
        for batch in batches:
            kernel.attention.attend(query, (new, new), (kernel.keys, kernel.values), batch)

    return measure_s(as_graph(attend, device), device) / len(batches)


def measure_decode(
    kernel: Kernel, batch_size: int, context: int, options: Options, ceilings: Ceilings
) -> dict[str, Any] | None:
    """Return the figures of one batch size and context; None if the pool is too small for them."""
    num_blocks = batch_size * -(-context // _BLOCK_SIZE)
    read_bytes = batch_size * context * kernel.bytes_per_token
    turns = min(_MAX_TURNS, -(-_OUTSIDE_CACHE_BYTES // read_bytes), kernel.keys.shape[0] // num_blocks)
    if not turns:
        return None
    batches = make_batches(kernel, [(context - 1, 1)] * batch_size, turns if options.is_cuda else 1)
    seconds = time_s(kernel, batches, options.device)
    gb_s = read_bytes / seconds / 1e9
    return {
        "batch": batch_size,
        "context": context,
        "us": seconds * 1e6,
        "gb_s": gb_s,
        "percent_of_copy": 100 * gb_s / ceilings.copy_gb_s,
    }


def measure_prefill(
    kernel: Kernel, cached: int, num_tokens: int, options: Options, ceilings: Ceilings
) -> dict[str, Any]:
    """Return the figures of one chunk behind `cached` tokens."""
    seconds = time_s(kernel, make_batches(kernel, [(cached, num_tokens)], 1), options.device)
    num_seen = num_tokens * cached + num_tokens * (num_tokens + 1) // 2
    operations = 4 * kernel.heads.num_heads * kernel.heads.head_dim * num_seen
    figures = {
        "cached": cached,
        "tokens": num_tokens,
        "us": seconds * 1e6,
        "tflops": operations / seconds / 1e12,
        "percent_of_matmul": 100 * operations / seconds / 1e12 / ceilings.matmul_tflops,
    }
    if not cached:
        figures["sdpa_tflops"] = operations / _sdpa_s(kernel, num_tokens, options.device) / 1e12
    return figures


def _sdpa_s(kernel: Kernel, num_tokens: int, device: str) -> float:
    """Return the seconds of torch's attention for a prompt whose keys and values lie together."""

    def random(num_heads: int) -> Tensor:
        shape = (1, num_heads, num_tokens, kernel.heads.head_dim)
        return torch.randn(shape, device=device).to(kernel.keys.dtype)  # (1, heads, tokens, head_dim)

    query, key, value = (random(n) for n in (kernel.heads.num_heads, *[kernel.heads.num_kv_heads] * 2))

    def attend() -> None:
        functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    return measure_s(attend, device)


def measure(name: str, config: ModelConfig, options: Options, findings: Findings, clock: Clock) -> None:
    """Add all figures of one shape to the findings; what the time does not suffice for is left out."""
    ceilings = ceilings_of(options)
    batches, contexts = (_TINY_BATCHES, _TINY_CONTEXTS) if options.is_tiny else (_BATCHES, _CONTEXTS)
    chunks = _TINY_CHUNKS if options.is_tiny else _CHUNKS
    kernel = make_kernel(config, options, max(batches) * (max(contexts) + _BLOCK_SIZE))
    figures: dict[str, Any] = {"decode": [], "prefill": [], "left_out": []}
    for cached, num_tokens in chunks:
        if clock.left_s > 0:
            figures["prefill"].append(measure_prefill(kernel, cached, num_tokens, options, ceilings))
            findings.put(name, figures)
    # The sizes that the bars speak of come first.
    for batch_size, context in sorted(product(batches, contexts), key=lambda size: -size[0]):
        row = measure_decode(kernel, batch_size, context, options, ceilings) if clock.left_s > 0 else None
        figures["decode" if row else "left_out"].append(row or [batch_size, context])
        findings.put(name, figures)


def main() -> None:
    """Measure each shape."""
    options = parse(__doc__)
    clock, findings = Clock(options.limit_s), Findings(options.json)
    shapes = list_shapes(is_tiny=options.is_tiny)
    with torch.inference_mode():
        for number, (name, config) in enumerate(shapes.items()):
            measure(name, config, options, findings, Clock(clock.left_s / (len(shapes) - number)))
            if options.is_cuda:
                torch.cuda.empty_cache()
    for name in shapes:
        for kind in ("decode", "prefill"):
            for row in findings.values[name][kind]:
                print(name, kind, row)


if __name__ == "__main__":
    main()
