import pytest

from app.load.synthetic import TokenSource
from app.load.traces import TraceRow, read_trace
from app.resources import data_file

VOCAB_SIZE = 49_152


def row(num_prompt_tokens: int, *hash_ids: int, num_output_tokens: int = 1) -> TraceRow:
    return TraceRow(0.0, num_prompt_tokens, num_output_tokens, hash_ids or None)


def test_prompt_has_the_length_it_says_and_ordinary_ids() -> None:
    source = TokenSource(VOCAB_SIZE, seed=1, scale=1)

    for item, num_tokens in [(row(700), 700), (row(0), 1), (row(700, 5, 6), 700), (row(1024, 5, 6), 1024)]:
        prompt = source.prompt(item, 0)
        assert len(prompt) == source.num_prompt_tokens(item) == num_tokens
        assert all(1000 <= token < VOCAB_SIZE for token in prompt)


def test_small_vocabularies_are_served_too() -> None:
    assert set(TokenSource(10, seed=1, scale=1).prompt(row(200), 0)) == {5, 6, 7, 8, 9}


@pytest.mark.parametrize("scale", [1, 2, 32, 100, 512, 1000])
def test_rows_share_exactly_the_tokens_of_equal_leading_ids(scale: float) -> None:
    source = TokenSource(VOCAB_SIZE, seed=1, scale=scale)
    per_id = max(1, round(512 / scale))

    first, second = source.prompt(row(1536, 1, 2, 3), 0), source.prompt(row(1200, 1, 2, 4), 1)

    assert len(first) == 3 * per_id
    assert first[: 2 * per_id] == second[: 2 * per_id]
    assert first[2 * per_id] != second[2 * per_id]


def test_seed_decides_the_tokens() -> None:
    prompts = [TokenSource(VOCAB_SIZE, seed=seed, scale=1).prompt(row(100), 0) for seed in (1, 1, 2)]

    assert prompts[0] == prompts[1] != prompts[2]


def test_rows_without_hash_ids_differ() -> None:
    source = TokenSource(VOCAB_SIZE, seed=1, scale=1)

    assert source.prompt(row(100), 0) != source.prompt(row(100), 1)


def test_outputs_are_scaled_and_never_empty() -> None:
    source = TokenSource(VOCAB_SIZE, seed=1, scale=32)

    assert [source.num_output_tokens(row(1, num_output_tokens=n)) for n in (0, 3, 320)] == [1, 1, 10]


def test_scaling_keeps_the_sharing_of_a_real_trace() -> None:
    rows = read_trace(data_file("mooncake.jsonl"), max_rows=200).rows
    source = TokenSource(VOCAB_SIZE, seed=0, scale=32)
    block_of_id: dict[int, tuple[int, ...]] = {}

    for index, item in enumerate(rows):
        prompt = source.prompt(item, index)
        assert item.hash_ids is not None
        for position, hash_id in enumerate(item.hash_ids[:-1]):
            block = tuple(prompt[position * 16 : position * 16 + 16])
            assert block_of_id.setdefault(hash_id, block) == block
    assert len(set(block_of_id.values())) == len(block_of_id)
