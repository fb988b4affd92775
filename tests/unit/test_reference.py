import pytest

from tests.support.reference import Oracle, judge

MESSAGES = [{"role": "user", "content": "spell"}]


def make_oracle(word: str, gaps: list[float], *, end: str = "") -> Oracle:
    """A reference that says `word`, letter by letter, with the given preference for each letter."""

    def rank(token_ids: list[int]) -> list[tuple[int, float]]:
        position = len(token_ids) - 1
        return [(ord(word[position]), gaps[position]), (ord("?"), 0.0)]

    ends = frozenset(map(ord, end))

    def decode(token_ids: list[int]) -> str:
        return "".join(chr(token_id) for token_id in token_ids if token_id not in ends)

    return Oracle(lambda _: [0], decode, rank, ends)


@pytest.mark.parametrize("texts", [("abcd", "abxy"), ("abxy", "abcd")])
def test_the_gap_is_taken_where_the_texts_part(texts: tuple[str, str]) -> None:
    clear = judge(make_oracle("abcd", [1.0, 1.0, 0.5, 1.0]), MESSAGES, texts)
    assert (clear.position, clear.gap, clear.counts) == (2, 0.5, True)
    tie = judge(make_oracle("abcd", [1.0, 1.0, 1e-5, 1.0]), MESSAGES, texts)
    assert not tie.counts


def test_two_texts_that_are_both_wrong_count_at_the_first_wrong_token() -> None:
    found = judge(make_oracle("abcd", [1.0, 2.0, 1.0, 1.0]), MESSAGES, ("axcd", "aycd"))
    assert (found.position, found.counts) == (1, True)


def test_an_answer_that_ends_where_the_other_goes_on_parts_at_its_end() -> None:
    found = judge(make_oracle("ab.zz", [1.0, 1.0, 1e-5, 1.0, 1.0], end="."), MESSAGES, ("ab", "abcd"))
    assert (found.position, found.counts) == (2, False)
