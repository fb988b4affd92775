"""Norms, gate and rotation against the same in plain torch, rounding included."""

import pytest
import torch
from torch import Tensor

from engine.kernels.triton.device_limits import IS_INTERPRETED
from engine.kernels.triton.ops import TritonOps
from engine.model.config import ModelConfig, RopeScaling
from engine.model.layer_ops import HeadNorms, HeadShape, TorchOps
from engine.model.layers import RotaryTable
from engine.model.step import ForwardBatch
from tests.support.attention_reference import AttentionShape, make_case

EPS = 1e-5
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Sums are added in another order: the halves may differ by two units in the last place. The interpreter cuts
# bfloat16 off instead of rounding it, up to three times in a row.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 4e-2 if IS_INTERPRETED else 1.6e-2}
SIZES = [1, 5, 64, 576, 3000]


def assert_equal(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def random(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(size: int, dtype: torch.dtype, device: str) -> None:
    x, weight = random(3, size, dtype=dtype, device=device), random(size, dtype=dtype, device=device)
    before = x.clone()
    assert_equal(TritonOps().rms_norm(x, weight, EPS), TorchOps().rms_norm(x, weight, EPS))
    assert torch.equal(x, before)


def test_rms_norm_of_rows_that_lie_apart_and_of_more_dimensions(device: str) -> None:
    weight = random(32, dtype=torch.float32, device=device)
    x = random(4, 2, 3, 64, dtype=torch.float32, device=device)[..., :32]
    assert_equal(TritonOps().rms_norm(x, weight, EPS), TorchOps().rms_norm(x, weight, EPS))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(size: int, dtype: torch.dtype, device: str) -> None:
    hidden, delta = (random(3, size, dtype=dtype, device=device) for _ in range(2))
    weight = random(size, dtype=dtype, device=device)
    expected_sum = hidden.clone()
    expected = TorchOps().add_rms_norm(expected_sum, delta, weight, EPS)
    assert_equal(TritonOps().add_rms_norm(hidden, delta, weight, EPS), expected)
    if dtype == torch.bfloat16 and IS_INTERPRETED:
        assert_equal(hidden, expected_sum)
    else:
        assert torch.equal(hidden, expected_sum)


@pytest.mark.parametrize("size", [1, 5, 96, 1024, 1500])
@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(size: int, dtype: torch.dtype, device: str) -> None:
    gate_up = 5 * random(3, 2 * size, dtype=dtype, device=device)
    assert_equal(TritonOps().silu_mul(gate_up), TorchOps().silu_mul(gate_up))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, in the interpreter
def test_silu_mul_of_gates_whose_exponential_is_infinite(device: str) -> None:
    gate_up = torch.tensor([[-1000.0, -100.0, 1000.0, 3.0, 3.0, 3.0]], device=device)
    assert_equal(TritonOps().silu_mul(gate_up), TorchOps().silu_mul(gate_up))


def test_no_rows_are_no_work(device: str) -> None:
    empty = torch.empty((0, 32), device=device)
    weight = torch.ones(32, device=device)
    assert TritonOps().rms_norm(empty, weight, EPS).shape == (0, 32)
    assert TritonOps().add_rms_norm(empty, empty, weight, EPS).shape == (0, 32)
    assert TritonOps().silu_mul(empty).shape == (0, 16)


# ---- rotation


def make_rotary(head_dim: int, device: str) -> RotaryTable:
    config = ModelConfig(
        architecture="llama",
        hidden_size=64,
        intermediate_size=64,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=head_dim,
        vocab_size=8,
        max_position=128,
        rope_theta=10000.0,
        rope_scaling=RopeScaling(),
        rms_norm_eps=EPS,
        tied_embeddings=True,
        qkv_bias=False,
        output_bias=False,
        qk_norm=False,
        eos_token_ids=frozenset(),
    )
    return RotaryTable(config, 128, torch.device(device))


def make_batch(shape: AttentionShape, device: str) -> tuple[ForwardBatch, tuple[int, ...]]:
    """Return a step of single tokens and a chunk, two of whose rows are padding, and the cache's shape."""
    case = make_case(shape, [(3, 1), (70, 1), (40, 4)], torch.float32, device)
    case.batch.slot_mapping[[1, 4]] = -1
    case.batch.has_padding = True
    return case.batch, tuple(case.cache[0].shape)


@pytest.mark.parametrize("head_dim", [16, 24, 64, 80, 128, 256])
@pytest.mark.parametrize(("group", "num_kv_heads"), [(1, 1), (3, 2), (8, 3)])
@pytest.mark.parametrize("has_norms", [False, True])
def test_rotate_and_store(head_dim: int, group: int, num_kv_heads: int, has_norms: bool, device: str) -> None:
    dtype = DTYPES[(head_dim + group + has_norms) % 3]
    shape = AttentionShape(head_dim, group, num_kv_heads, block_size=5)
    heads = HeadShape(shape.num_heads, num_kv_heads, head_dim, EPS)
    norms = None
    if has_norms:
        norms = HeadNorms(*(random(head_dim, dtype=dtype, device=device) for _ in range(2)))
    batch, cache_shape = make_batch(shape, device)
    num_rows = shape.num_heads + 2 * num_kv_heads
    qkv = random(len(batch.positions), num_rows * head_dim, dtype=dtype, device=device)
    rotary = make_rotary(head_dim, device)
    results = []
    for ops in (TritonOps(), TorchOps()):
        cache = (torch.full(cache_shape, torch.nan, dtype=dtype, device=device),) * 2
        cache = (cache[0], cache[0].clone())
        returned = ops.rotate_and_store(qkv.clone(), heads, norms, rotary, cache, batch)
        results.append((*returned, *cache))
    for found, expected in zip(*results, strict=True):
        assert found.shape == expected.shape
        assert torch.equal(found.isnan(), expected.isnan()), "slots of no token stay as they are"
        assert_equal(found.nan_to_num(), expected.nan_to_num())
    _, key, value, keys, values = results[0]
    kept = batch.slot_mapping >= 0
    slots = batch.slot_mapping[kept].long()
    assert torch.equal(keys.flatten(0, 1)[slots], key[kept]), "what is returned is what is stored"
    assert torch.equal(values.flatten(0, 1)[slots], value[kept])
