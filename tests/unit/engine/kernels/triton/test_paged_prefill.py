"""The kernel for chunks of tokens against float64: shapes, prefixes, ragged batches, boundaries, windows."""

import random
from itertools import product

import pytest
import torch

from engine.kernels.triton.device_limits import DeviceLimits
from engine.kernels.triton.paged_prefill import PrefillOptions, PrefillTiles, choose_tiles, paged_prefill
from tests.support.attention_reference import TOLERANCE, AttentionCase, AttentionShape, make_case

HEAD_DIMS, GROUPS, BLOCK_SIZES = (16, 24, 64, 80, 96, 128, 256), (1, 3, 4, 8), (1, 5, 16, 32)
DTYPES = (torch.float32, torch.float16)
SMALL_TILES = PrefillTiles(num_rows=16, num_keys=16, num_warps=4, num_stages=2)
# (context, tokens computed): whole prompts and chunks behind a prefix, around the ends of tiles and blocks.
CHUNKS = [(2, 2), (17, 17), (33, 16), (40, 3)]

# Every head_dim with every group; block sizes and number formats take turns, so that all pairs are met.
GRID = [
    (AttentionShape(head_dim, group, 2, BLOCK_SIZES[(i + j) % 4]), DTYPES[(i + j // 2) % 2])
    for (i, head_dim), (j, group) in product(enumerate(HEAD_DIMS), enumerate(GROUPS))
]


def prefill(case: AttentionCase, options: PrefillOptions) -> torch.Tensor:
    output = torch.full_like(case.query, 7.0)
    paged_prefill(case.query, case.cache, case.batch, output, options)
    return output.flatten(1).double()


def check(case: AttentionCase, options: PrefillOptions) -> None:
    tolerance, first = TOLERANCE[case.query.dtype], case.batch.num_decodes
    attended, expected = prefill(case, options), case.expected(options.window)
    torch.testing.assert_close(attended[first:], expected[first:], atol=tolerance, rtol=tolerance)
    assert (attended[:first] == 7).all(), "rows of single tokens belong to the other kernel"


@pytest.mark.parametrize(("shape", "dtype"), GRID, ids=str)
def test_attention_equals_float64(shape: AttentionShape, dtype: torch.dtype, device: str) -> None:
    check(make_case(shape, CHUNKS, dtype, device), PrefillOptions(tiles=SMALL_TILES))


@pytest.mark.parametrize("head_dim", [16, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_around_the_end_of_a_tile_of_the_chosen_size(
    head_dim: int, dtype: torch.dtype, device: str
) -> None:
    group = 4
    tiles = choose_tiles(head_dim, dtype, group, DeviceLimits(132, 232448))
    size, keys = tiles.num_rows // group, tiles.num_keys
    chunks = [(size, size), (size + 1, size + 1), (keys + size - 1, size - 1), (2 * keys, size)]
    check(make_case(AttentionShape(head_dim, group, 1), chunks, dtype, device), PrefillOptions())


@pytest.mark.parametrize("seed", range(6))
def test_any_ragged_batch_behind_any_number_of_single_tokens(seed: int, device: str) -> None:
    rng = random.Random(seed)
    single = [(rng.randint(1, 30), 1) for _ in range(rng.randint(0, 5))]
    counts = [rng.randint(2, 40) for _ in range(rng.randint(1, 7))]
    chunks = [(count + rng.choice([0, 0, 1, 16, 30]), count) for count in counts]
    shape = AttentionShape(16, rng.choice([1, 2, 3, 5]), 1, rng.choice([1, 4, 16, 48]))
    case = make_case(shape, single + chunks, torch.float32, device, seed=seed)
    check(case, PrefillOptions(tiles=SMALL_TILES))


@pytest.mark.parametrize("window", [1, 5, 16, 17, 40, 1000])
@pytest.mark.parametrize("group", [1, 5])
def test_a_window_hides_what_lies_before_it(window: int, group: int, device: str) -> None:
    chunks = [(2, 2), (40, 40), (90, 30), (70, 3)]
    case = make_case(AttentionShape(16, group, 1), chunks, torch.float32, device)
    check(case, PrefillOptions(window, SMALL_TILES))


@pytest.mark.parametrize("window", [0, 20])
def test_block_tables_are_read_no_further_than_the_context(window: int, device: str) -> None:
    # A read of such a block would end the process.
    shape, chunks = AttentionShape(16, 2, 2, 5), [(2, 2), (16, 16), (37, 20)]
    case = make_case(shape, chunks, torch.float32, device, garbage=1 << 30)
    check(case, PrefillOptions(window, SMALL_TILES))


@pytest.mark.parametrize("window", [0, 20])
def test_a_sequence_without_tokens_gives_zeros(window: int, device: str) -> None:
    case = make_case(AttentionShape(16, 1), [(20, 20), (40, 40)], torch.float32, device)
    case.batch.context_lens[1] = 0
    case.slots[1] = case.slots[1][:0]
    check(case, PrefillOptions(window, SMALL_TILES))


def test_bfloat16_is_computed_in_float32_by_the_interpreter(device: str) -> None:
    check(make_case(AttentionShape(64, 2), [(40, 20), (30, 30)], torch.bfloat16, device), PrefillOptions())


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 7, 64])
@pytest.mark.parametrize("shared_memory", [101376, 166912, 232448])
def test_tiles_fit_the_shared_memory_and_hold_a_token(
    head_dim: int, dtype: torch.dtype, group: int, shared_memory: int
) -> None:
    tiles = choose_tiles(head_dim, dtype, group, DeviceLimits(100, shared_memory))
    assert tiles.num_rows >= group
    if group < 64 or dtype == torch.bfloat16:
        assert tiles.shared_bytes(head_dim, dtype) <= shared_memory
    for size in (tiles.num_rows, tiles.num_keys):
        assert size >= 16
        assert size & (size - 1) == 0
