import pytest

from tests.support.reference import Oracle, judge

MESSAGES = [{"role": "user", "content": "spell"}]


def make_oracle(word: str, gaps: list[float]) -> Oracle:
    """A reference that says `word`, letter by letter, with the given preference for each letter."""

    def rank(token_ids: list[int]) -> list[tuple[int, float]]:
        position = len(token_ids) - 1
        return [(ord(word[position]), gaps[position]), (ord("?"), 0.0)]

    return Oracle(lambda _: [0], lambda ids: "".join(map(chr, ids)), rank)


@pytest.mark.parametrize("texts", [("abcd", "abxy"), ("abxy", "abcd")])
def test_the_gap_is_taken_where_the_texts_part(texts: tuple[str, str]) -> None:
    clear = judge(make_oracle("abcd", [1.0, 1.0, 0.5, 1.0]), MESSAGES, texts)
    assert (clear.position, clear.gap, clear.counts) == (2, 0.5, True)
    tie = judge(make_oracle("abcd", [1.0, 1.0, 1e-5, 1.0]), MESSAGES, texts)
    assert not tie.counts


def test_two_texts_that_are_both_wrong_count_at_the_first_wrong_token() -> None:
    found = judge(make_oracle("abcd", [1.0, 2.0, 1.0, 1.0]), MESSAGES, ("axcd", "aycd"))
    assert (found.position, found.counts) == (1, True)
