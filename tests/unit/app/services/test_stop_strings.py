from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from app.services.stop_strings import StopMatcher


def run(stops: tuple[str, ...], pieces: list[str]) -> tuple[list[str], bool]:
    matcher = StopMatcher(stops)
    sent = []
    for piece in pieces:
        text, stopped = matcher.push(piece)
        sent.append(text)
        if stopped:
            return sent, True
    sent.append(matcher.finish())
    return sent, False


def test_without_stops_everything_passes_at_once() -> None:
    assert run((), ["a", "b"]) == (["a", "b", ""], False)


def test_a_stop_string_across_pieces_is_found_and_no_part_of_it_is_sent() -> None:
    assert run(("DEFG",), ["ABC", "D", "EF", "GHI"]) == (["ABC", "", "", ""], True)


def test_a_stop_string_inside_one_piece_cuts_it() -> None:
    assert run(("Pari",), ["in Paris"]) == (["in "], True)


def test_held_text_is_released_when_the_match_fails() -> None:
    assert run(("DEFG",), ["ABCDE", "X"]) == (["ABC", "DEX", ""], False)


def test_held_text_is_released_when_the_answer_ends() -> None:
    assert run(("DEFG",), ["ABCDE"]) == (["ABC", "DE"], False)


def test_exactly_the_longest_possible_beginning_is_held_back() -> None:
    matcher = StopMatcher(("aab",))
    assert matcher.push("xaaa") == ("xa", False)
    assert matcher.push("b") == ("", True)


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert run(("abcd", "bc"), ["abcd"]) == (["a"], True)
    assert run(("abcd", "bc"), ["a", "b", "c", "d"])[1]


@given(
    text=st.text(alphabet="abc", max_size=40),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(min_value=0, max_value=40), max_size=10),
)
def test_the_result_does_not_depend_on_the_pieces(text: str, stops: list[str], cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(bounds)]
    whole, whole_stopped = run(tuple(stops), [text])
    sent, stopped = run(tuple(stops), pieces)
    assert ("".join(sent), stopped) == ("".join(whole), whole_stopped)
    assert not any(stop in "".join(sent) for stop in stops)
    assert text.startswith("".join(sent))
    if not stopped:
        assert "".join(sent) == text
