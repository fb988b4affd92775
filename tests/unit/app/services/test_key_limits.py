import pytest

from app.services.key_limits import KeyLimits
from engine.errors import QueueFullError


def test_a_client_has_so_many_places_and_others_have_theirs() -> None:
    limits = KeyLimits(2)
    first, second = limits.take(b"a"), limits.take(b"a")
    limits.take(b"b")
    with pytest.raises(QueueFullError, match="You have 2 requests open") as caught:
        limits.take(b"a")
    assert caught.value.code == "concurrency_limit"

    first.give_back()
    first.give_back()
    limits.take(b"a")
    with pytest.raises(QueueFullError):
        limits.take(b"a")
    second.give_back()


def test_who_has_nothing_open_is_forgotten() -> None:
    limits = KeyLimits(1)
    for number in range(100):
        limits.take(b"%d" % number).give_back()
    place = limits.take(b"a")
    with pytest.raises(QueueFullError, match="You have 1 request open"):
        limits.take(b"a")
    assert limits.num_clients == 1
    place.give_back()
    assert limits.num_clients == 0


def test_without_a_limit_or_a_client_nothing_is_counted() -> None:
    unlimited, limited = KeyLimits(0), KeyLimits(1)
    for _ in range(3):
        unlimited.take(b"a")
        limited.take(None)
    assert unlimited.num_clients == limited.num_clients == 0
