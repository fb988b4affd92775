"""The kernels beside attention as cases, and the grid: which shapes of all kernels are compared."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from bench.device import float64
from bench.device.kernel_cases import AttentionCase, Case, Heads, Spans
from bench.device.shapes import QWEN3_06B
from engine.model.attention import AttentionBackend, KVCache
from engine.model.layer_ops import HeadNorms, HeadShape, LayerOps
from engine.model.layers import RotaryTable
from engine.model.step import ForwardBatch

_EPS = 1e-6
_BLOCK_SIZE = 16


@dataclass(frozen=True)
class NormCase:
    """The norm of rows, alone or after something was added to them."""

    dtype: str
    num_rows: int
    size: int
    is_added: bool

    @property
    def name(self) -> str:
        """What is compared."""
        title = "add and norm" if self.is_added else "norm"
        return f"{title}, {self.num_rows} rows of {self.size}, {self.dtype}"

    def run(self, attention: AttentionBackend, ops: LayerOps, device: torch.device) -> float:  # noqa: ARG002
        """Return the largest error, of the sum too if there is one."""
        random = _Random(self.name, self.dtype, device)
        hidden, weight = random(self.num_rows, self.size), 1 + 0.1 * random(self.size)
        if not self.is_added:
            return float64.largest_error(
                ops.rms_norm(hidden, weight, _EPS), float64.rms_norm(hidden, weight, _EPS)
            )
        delta = random(self.num_rows, self.size)  # (rows, size)
        total = hidden.double() + delta.double()  # (rows, size)
        normed = ops.add_rms_norm(hidden, delta, weight, _EPS)  # (rows, size)
        return max(
            float64.largest_error(hidden, total),
            float64.largest_error(normed, float64.rms_norm(total, weight, _EPS)),
        )


@dataclass(frozen=True)
class SiluCase:
    """`silu(gate) * up`."""

    dtype: str
    num_rows: int
    size: int

    @property
    def name(self) -> str:
        """What is compared."""
        return f"silu and multiply, {self.num_rows} rows of {self.size}, {self.dtype}"

    def run(self, attention: AttentionBackend, ops: LayerOps, device: torch.device) -> float:  # noqa: ARG002
        """Return the largest error."""
        gate_up = 4 * _Random(self.name, self.dtype, device)(self.num_rows, 2 * self.size)  # (rows, 2 * size)
        return float64.largest_error(ops.silu_mul(gate_up), float64.silu_mul(gate_up))


@dataclass(frozen=True)
class RotateCase:
    """Norm, rotation and storing of queries, keys and values; the last rows are padding."""

    dtype: str
    heads: Heads
    num_rows: int
    has_norms: bool
    num_padding: int = 2

    @property
    def name(self) -> str:
        """What is compared."""
        title = "norm, rotate, store" if self.has_norms else "rotate, store"
        return f"{title}, {self.num_rows} rows, {self.heads}, {self.dtype}"

    def run(self, attention: AttentionBackend, ops: LayerOps, device: torch.device) -> float:  # noqa: ARG002
        """Return the largest error of queries, keys, values and what was stored of them."""
        random, heads = _Random(self.name, self.dtype, device), self.heads
        num_rows = self.num_rows + self.num_padding
        num_blocks = -(-self.num_rows // _BLOCK_SIZE) + 2
        num_columns = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
        qkv = random(num_rows, num_columns)  # (rows, columns)
        norms = None
        if self.has_norms:
            norms = HeadNorms(1 + 0.1 * random(heads.head_dim), 1 + 0.1 * random(heads.head_dim))
        positions = torch.arange(num_rows, dtype=torch.int32, device=device) * 3  # (rows) int32
        slots = torch.randperm(num_blocks * _BLOCK_SIZE, generator=random.generator, device=device)
        slots = slots[:num_rows].int()  # (rows) int32
        slots[self.num_rows :] = -1
        rotary = RotaryTable(replace(QWEN3_06B, head_dim=heads.head_dim), 3 * num_rows, device)
        sizes = (num_blocks, _BLOCK_SIZE, heads.num_kv_heads, heads.head_dim)
        cache = KVCache(1, sizes, getattr(torch, self.dtype), device)
        cache.storage.fill_(torch.nan)
        stored = (cache.keys[0], cache.values[0])
        shape = HeadShape(heads.num_heads, heads.num_kv_heads, heads.head_dim, _EPS)
        found = ops.rotate_and_store(qkv.clone(), shape, norms, rotary, stored, _make_batch(positions, slots))
        expected = self._expect(qkv, norms, rotary.at(positions))
        kept = self.num_rows
        errors = [
            float64.largest_error(one[:kept], other[:kept])
            for one, other in zip(found, expected, strict=True)
        ]
        places = slots[:kept].long()  # (kept) int64
        for part, numbers in zip(stored, expected[1:], strict=True):
            rows = part.flatten(0, 1)  # (slots, kv_heads, head_dim)
            errors.append(float64.largest_error(rows[places], numbers[:kept]))
            rows[places] = torch.nan
            errors.append(0.0 if rows.isnan().all() else float("inf"))  # nothing else was written
        return max(errors)

    def _expect(
        self, qkv: Tensor, norms: HeadNorms | None, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = qkv.view(len(qkv), -1, self.heads.head_dim)  # (rows, heads + 2 * kv_heads, head_dim)
        sizes = [self.heads.num_heads, self.heads.num_kv_heads, self.heads.num_kv_heads]
        query, key, value = torch.split(
            rows, sizes, 1
        )  # (rows, heads, head_dim), 2 * (rows, kv_heads, head_dim)
        if norms is not None:
            query = float64.rms_norm(query, norms.query, _EPS)
            key = float64.rms_norm(key, norms.key, _EPS)
        return float64.rotate(query, *angles), float64.rotate(key, *angles), value.double()


class _Random:
    """Normal numbers of a type, the same for each case whenever it runs."""

    def __init__(self, name: str, dtype: str, device: torch.device) -> None:
        self.generator = torch.Generator(device).manual_seed(sum(name.encode()))
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._device = device

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self._device).to(self._dtype)


def _make_batch(positions: Tensor, slots: Tensor) -> ForwardBatch:
    """Return a batch of rows that are sequences of one token, of which the last ones are padding."""
    num_rows = len(positions)
    nothing = torch.zeros(num_rows, dtype=torch.int32, device=positions.device)  # (rows) int32
    return ForwardBatch(
        input_ids=nothing,
        positions=positions,
        slot_mapping=slots,
        query_starts=torch.arange(num_rows + 1, dtype=torch.int32, device=positions.device),
        context_lens=nothing,
        block_tables=nothing[:, None],
        logits_rows=nothing,
        num_decodes=num_rows,
        max_query_len=1,
        max_context_len=1,
        has_padding=True,
    )


_WIDE = [
    Heads(16, 8, 128), Heads(32, 8, 64), Heads(9, 3, 64), Heads(10, 2, 80),
    Heads(12, 4, 96), Heads(4, 1, 256), Heads(14, 2, 64), Heads(8, 8, 128),
]  # fmt: skip
_DECODES: Spans = ((0, 1), (1, 1), (14, 1), (15, 1), (16, 1), (299, 1), (1024, 1), (8191, 1))
_MANY: Spans = tuple((index * 37 % 700, 1) for index in range(64))
_BEGINNINGS: Spans = ((0, 2), (0, 37), (0, 128), (0, 515))
_CHUNKS: Spans = ((16, 3), (130, 70), (8000, 192), (5, 300))
_MIXED: Spans = ((3, 1), (700, 1), (0, 33), (65, 190))
_SCENARIOS = {"decode": _DECODES, "prefill": _BEGINNINGS, "chunks": _CHUNKS, "mixed": _MIXED, "many": _MANY}


def list_cases(*, is_tiny: bool) -> list[Case]:
    """Return the grid, no two cases of the same name; what matters most comes first."""
    return list(_tiny_cases()) if is_tiny else [*_attention_cases(), *_other_cases()]


def _attention_cases() -> Iterator[Case]:
    for dtype, heads in product(("bfloat16", "float16", "float32"), _WIDE):
        if dtype == "bfloat16" or heads in _WIDE[:5]:
            for title, spans in _SCENARIOS.items():
                yield AttentionCase(title, dtype, heads, spans)
            yield AttentionCase("padded decode", dtype, heads, _DECODES, num_padding=8)
    for block_size, heads in product((1, 8, 32, 64, 256), _WIDE[:2]):
        for title in ("decode", "mixed"):
            yield AttentionCase(title, "bfloat16", heads, _SCENARIOS[title], block_size=block_size)


def _other_cases() -> Iterator[Case]:
    for dtype in ("bfloat16", "float16", "float32"):
        for num_rows, size in product((1, 7, 256, 4096), (576, 1024, 2048, 4096)):
            yield NormCase(dtype, num_rows, size, is_added=False)
            yield NormCase(dtype, num_rows, size, is_added=True)
        for num_rows, size in product((1, 7, 256, 4096), (1536, 3072, 8192)):
            yield SiluCase(dtype, num_rows, size)
        for heads, num_rows, has_norms in product(_WIDE, (1, 61, 1024), (False, True)):
            yield RotateCase(dtype, heads, num_rows, has_norms)


def _tiny_cases() -> Iterator[Case]:
    heads = Heads(4, 2, 64)
    for dtype in ("float32", "float16"):  # Triton's interpreter does not multiply bfloat16
        yield AttentionCase("mixed", dtype, heads, ((3, 1), (20, 1), (0, 5), (17, 3)))
        yield RotateCase(dtype, heads, 5, has_norms=True)
    yield AttentionCase("padded decode", "float32", heads, ((0, 1), (33, 1)), num_padding=2)
    yield NormCase("float32", 3, 96, is_added=True)
    yield NormCase("float32", 3, 96, is_added=False)
    yield SiluCase("float32", 3, 96)
