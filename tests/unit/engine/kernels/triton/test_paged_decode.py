"""The kernel for single tokens against float64: shapes, splits, boundaries, padding, windows."""

from itertools import product

import pytest
import torch

from engine.kernels.triton.device_limits import DeviceLimits
from engine.kernels.triton.paged_decode import (
    MAX_SPLITS,
    DecodeOptions,
    DecodeTiles,
    choose_num_splits,
    choose_tiles,
    paged_decode,
)
from tests.support.attention_reference import TOLERANCE, AttentionCase, AttentionShape, make_case

HEAD_DIMS, GROUPS, BLOCK_SIZES = (16, 24, 64, 80, 96, 128, 256), (1, 3, 4, 8), (1, 5, 16, 32)
DTYPES = (torch.float32, torch.float16)
SMALL_TILES = DecodeTiles(16)
CONTEXTS = (1, 15, 16, 17, 32, 70)
H200 = DeviceLimits(num_processors=132, shared_memory=232448)

# Every head_dim with every group; block sizes and number formats take turns, so that all pairs are met.
GRID = [
    (AttentionShape(head_dim, group, 2, BLOCK_SIZES[(i + j) % 4]), DTYPES[(i + j // 2) % 2], 1 + (i + j) % 3)
    for (i, head_dim), (j, group) in product(enumerate(HEAD_DIMS), enumerate(GROUPS))
]


def decode(case: AttentionCase, options: DecodeOptions) -> torch.Tensor:
    output = torch.full_like(case.query, torch.nan)
    paged_decode(case.query, case.cache, case.batch, output, options)
    return output.flatten(1).double()


def check(case: AttentionCase, options: DecodeOptions) -> None:
    tolerance = TOLERANCE[case.query.dtype]
    expected = case.expected(options.window)
    torch.testing.assert_close(decode(case, options), expected, atol=tolerance, rtol=tolerance)


def single_tokens(*contexts: int) -> list[tuple[int, int]]:
    return [(context, 1) for context in contexts]


@pytest.mark.parametrize(("shape", "dtype", "num_splits"), GRID, ids=str)
def test_attention_equals_float64(
    shape: AttentionShape, dtype: torch.dtype, num_splits: int, device: str
) -> None:
    case = make_case(shape, single_tokens(*CONTEXTS), dtype, device)
    check(case, DecodeOptions(num_splits=num_splits, tiles=SMALL_TILES))


@pytest.mark.parametrize("head_dim", [32, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_contexts_around_the_end_of_a_tile_of_the_chosen_size(
    head_dim: int, dtype: torch.dtype, device: str
) -> None:
    size = choose_tiles(head_dim, dtype, H200).num_tokens
    contexts = (1, size - 1, size, size + 1, 2 * size, 2 * size + 1)
    check(make_case(AttentionShape(head_dim, 2), single_tokens(*contexts), dtype, device), DecodeOptions())


@pytest.mark.parametrize("num_splits", [1, 2, 3, 5, 16, MAX_SPLITS])
def test_any_number_of_splits_gives_the_same(num_splits: int, device: str) -> None:
    shape = AttentionShape(32, 4, 1, 5)
    case = make_case(shape, single_tokens(1, 16, 17, 100, 161), torch.float32, device)
    check(case, DecodeOptions(num_splits=num_splits, tiles=SMALL_TILES))


@pytest.mark.parametrize("window", [1, 7, 16, 17, 100, 1000])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_window_hides_what_lies_before_it(window: int, num_splits: int, device: str) -> None:
    case = make_case(AttentionShape(16, 2), single_tokens(1, 7, 16, 33, 120), torch.float32, device)
    check(case, DecodeOptions(window, num_splits, SMALL_TILES))


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("window", [0, 20])
def test_padding_reads_nothing_and_gives_zeros(num_splits: int, window: int, device: str) -> None:
    case = make_case(AttentionShape(32, 3), single_tokens(3, 40), torch.float32, device).with_padding(3)
    options = DecodeOptions(window, num_splits, SMALL_TILES)
    check(case, options)
    assert torch.equal(decode(case, options)[2:], torch.zeros(3, 192, dtype=torch.float64, device=device))


@pytest.mark.parametrize("num_splits", [1, 2])
def test_block_tables_are_read_no_further_than_the_context(num_splits: int, device: str) -> None:
    # A read of such a block would end the process.
    case = make_case(
        AttentionShape(16, 2, 2, 5), single_tokens(1, 5, 16, 37), torch.float32, device, garbage=1 << 30
    )
    check(case, DecodeOptions(num_splits=num_splits, tiles=SMALL_TILES))


def test_bfloat16_is_computed_in_float32_by_the_interpreter(device: str) -> None:
    case = make_case(AttentionShape(64, 2), single_tokens(1, 40, 100), torch.bfloat16, device)
    check(case, DecodeOptions(num_splits=2))


def test_rows_may_lie_apart(device: str) -> None:
    case = make_case(AttentionShape(32, 2), single_tokens(9, 40), torch.float32, device)
    case.query = torch.cat((case.query, torch.full_like(case.query, torch.nan)), 1)[:, :4]
    assert not case.query.is_contiguous()
    output = torch.empty(case.query.shape, device=device)
    paged_decode(case.query, case.cache, case.batch, output)
    torch.testing.assert_close(output.flatten(1).double(), case.expected(), atol=1e-5, rtol=1e-5)


def test_splits_fill_the_processors_and_no_more() -> None:
    assert choose_num_splits(64, 8, 2048, 132) == 1
    assert choose_num_splits(16, 8, 32768, 132) == 4
    assert choose_num_splits(1, 8, 32768, 132) == 50
    assert choose_num_splits(1, 1, 1 << 20, 132) == MAX_SPLITS
    assert choose_num_splits(1, 8, 700, 132) == 3, "a split has 256 tokens at least"
    assert choose_num_splits(1, 8, 1, 132) == 1


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("dtype", "num_programs"), [(torch.float32, 1), (torch.bfloat16, 2)])
@pytest.mark.parametrize("shared_memory", [101376, 232448])
def test_programs_have_room_on_a_multiprocessor(
    head_dim: int, dtype: torch.dtype, num_programs: int, shared_memory: int
) -> None:
    tiles = choose_tiles(head_dim, dtype, DeviceLimits(100, shared_memory))
    width = 1 << (head_dim - 1).bit_length()
    held = 4 * tiles.num_tokens * width * dtype.itemsize  # two tiles of keys and values
    assert num_programs * held <= shared_memory
    assert tiles.num_tokens & (tiles.num_tokens - 1) == 0
