"""Why the prefix cache held no more: evicted, differs, or new."""

from typing import Any

import pytest

from engine.kv.prefix_history import MAX_SIBLINGS, MIN_REMEMBERED, PrefixHistory
from engine.records import Admitted, BlockOpKind, PrefixMiss
from tests.builders import make_core, make_request, run_to_end
from tests.support.scheduling import events_of


def pack(*token_ids: int) -> bytes:
    return b"".join(token_id.to_bytes(4, "little") for token_id in token_ids)


def misses(*requests: tuple[str, list[int], str | None], **settings: Any) -> list[PrefixMiss | None]:
    """Run requests one after the other; return the reason of each first admission."""
    core = make_core(**{"num_blocks": 32, **settings})
    found = []
    for name, prompt, salt in requests:
        core.add_request(make_request(name, prompt=prompt, max_tokens=1, cache_salt=salt))
        found.append(events_of(run_to_end(core), Admitted)[0].miss)
    return found


def test_nothing_like_it_is_new_and_a_whole_hit_needs_no_reason() -> None:
    prompt = list(range(10))
    assert misses(("a", prompt, None), ("b", prompt, None)) == [PrefixMiss("new", 0), None]


@pytest.mark.parametrize("position", [0, 3, 4, 6, 8])
def test_the_first_other_token_is_named_also_inside_a_block(position: int) -> None:
    prompt = list(range(13))
    other = [*prompt[:position], 500, *prompt[position + 1 :]]
    assert misses(("a", prompt, None), ("b", other, None))[1] == PrefixMiss("differs", position, 0, "a")


def test_of_several_chains_the_closest_one_explains() -> None:
    near, far = [1, 2, 3, 4, 5], [9, 9, 9, 9, 9]
    found = misses(("near", near, None), ("far", far, None), ("it", [1, 2, 3, 7, 5], None))
    assert found[2] == PrefixMiss("differs", 3, 0, "near")


def test_of_equally_close_chains_the_newest_one_explains() -> None:
    found = misses(("a", [1, 2, 8, 8, 0], None), ("b", [1, 2, 9, 9, 0], None), ("it", [1, 2, 3, 4, 0], None))
    assert found[2] == PrefixMiss("differs", 2, 0, "b")


def test_an_eviction_is_named_with_its_step_and_the_request_that_needed_the_memory() -> None:
    core = make_core(num_blocks=4)
    prompt = list(range(9))
    core.add_request(make_request("a", prompt=prompt, max_tokens=1))
    run_to_end(core)
    core.add_request(make_request("hungry", prompt=list(range(100, 115)), max_tokens=1))
    results = run_to_end(core)
    (step,) = {
        result.record.step
        for result in results
        if any(op.kind == BlockOpKind.EVICT for op in result.record.block_ops)
    }
    core.add_request(make_request("a again", prompt=prompt, max_tokens=1))
    (admitted,) = events_of(run_to_end(core), Admitted)
    assert admitted.num_cached_tokens == 0
    assert admitted.miss == PrefixMiss("evicted", 0, step, "hungry")


def test_what_was_evicted_and_came_back_is_not_called_evicted() -> None:
    history = PrefixHistory(4)
    history.note_published(b"root", pack(1, 2), b"one", "a")
    history.note_evicted(b"one", 7, "b")
    assert history.explain(b"one", b"root", pack(1, 2), 4) == PrefixMiss("evicted", 4, 7, "b")
    history.note_published(b"one", pack(3, 4), b"two", "c")
    history.note_published(b"root", pack(1, 2), b"one", "c")
    assert history.explain(b"other", b"one", pack(3, 5), 2) == PrefixMiss("differs", 3, 0, "c")


def test_salted_chains_never_explain_each_other() -> None:
    prompt = list(range(10))
    other = [*prompt[:6], 500, 7, 8, 9]
    found = misses(("a", prompt, "s"), ("b", prompt, "t"), ("c", other, None), ("d", other, "s"))
    assert found == [*[PrefixMiss("new", 0)] * 3, PrefixMiss("differs", 6, 0, "a")]


def test_what_is_forgotten_is_new() -> None:
    history = PrefixHistory(4)
    for number in range(MIN_REMEMBERED + 1):
        name = str(number).encode()
        history.note_published(b"parent" + name, pack(1, 2), name, "a")
        history.note_evicted(name, number, "b")
    assert history.explain(b"0", b"parent0", pack(1, 2), 0) == PrefixMiss("new", 0)
    assert history.explain(b"x", b"parent0", pack(1, 3), 0) == PrefixMiss("new", 0)
    assert history.explain(b"1", b"parent1", pack(1, 2), 0) == PrefixMiss("evicted", 0, 1, "b")
    assert history.explain(b"x", b"parent1", pack(1, 3), 0) == PrefixMiss("differs", 1, 0, "a")


def test_of_many_ways_on_only_the_newest_are_remembered() -> None:
    history = PrefixHistory(4)
    for number in range(MAX_SIBLINGS + 1):
        history.note_published(b"root", pack(1, 10 + number), str(number).encode(), str(number))
    history.note_published(b"root", pack(1, 11), b"1", "again")  # not one more, but now the newest
    assert history.explain(b"x", b"root", pack(1, 3), 0) == PrefixMiss("differs", 1, 0, "again")
    assert history.explain(b"x", b"root", pack(1, 10), 0).kind == "differs"


def test_a_cache_that_is_off_gives_no_reasons() -> None:
    prompt = list(range(10))
    assert misses(("a", prompt, None), ("b", prompt, None), enable_prefix_caching=False) == [None, None]
