"""The host tier's books: found by content, the least recently used makes room, pins keep."""

import pytest

from engine.errors import EngineInvariantError
from engine.kv.host_tier import HostTier


def content(name: str) -> tuple[bytes, bytes, bytes]:
    return name.encode(), b"", name.encode()


def store(tier: HostTier, *names: str) -> list[int]:
    host_ids = [tier.store(*content(name)) for name in names]
    return [host_id for host_id in host_ids if host_id is not None]


def held(tier: HostTier, names: str) -> str:
    return "".join(name for name in names if tier.find(*content(name)) is not None)


def test_the_least_recently_used_one_makes_room() -> None:
    tier = HostTier(3)
    store(tier, *"abc")
    tier.pin(0)
    tier.unpin(0)  # used: now the most recent one
    store(tier, "d")
    assert held(tier, "abcd") == "acd"
    tier.check_integrity(0)


def test_what_is_offloaded_again_is_not_copied_and_counts_as_used() -> None:
    tier = HostTier(2)
    store(tier, *"ab")
    assert store(tier, "a") == []
    store(tier, "c")
    assert held(tier, "abc") == "ac"
    tier.check_integrity(0)


def test_what_is_pinned_stays_until_as_many_have_let_go() -> None:
    tier = HostTier(2)
    first, second = store(tier, *"ab")
    for host_id in (first, first, second):
        tier.pin(host_id)
    assert (tier.num_available, tier.num_pinned) == (0, 2)
    assert store(tier, "c") == []
    tier.unpin(first)
    assert store(tier, "c") == []
    tier.check_integrity(2)
    tier.unpin(first)
    assert store(tier, "c") == [first]
    assert held(tier, "abc") == "bc"


def test_pins_can_be_released_only_as_often_as_they_were_set() -> None:
    tier = HostTier(1)
    (host_id,) = store(tier, "a")
    tier.pin(host_id)
    tier.unpin(host_id)
    with pytest.raises(EngineInvariantError, match="twice"):
        tier.unpin(host_id)


def test_equal_hashes_of_other_tokens_are_neither_found_nor_replaced() -> None:
    tier = HostTier(2)
    assert tier.store(b"hash", b"", b"tokens") is not None
    assert tier.find(b"hash", b"", b"others") is None
    assert tier.find(b"hash", b"parent", b"tokens") is None
    assert tier.store(b"hash", b"", b"others") is None
    assert tier.find(b"hash", b"", b"tokens") is not None


def test_the_check_finds_a_pin_without_an_owner() -> None:
    tier = HostTier(2)
    (host_id,) = store(tier, "a")
    tier.pin(host_id)
    with pytest.raises(EngineInvariantError, match="pins"):
        tier.check_integrity(0)


def test_a_tier_of_no_blocks_takes_nothing() -> None:
    tier = HostTier(0)
    assert tier.store(*content("a")) is None
    tier.check_integrity(0)
