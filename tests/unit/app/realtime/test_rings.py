import random

import pytest

from app.realtime.rings import ByteRing


def test_ring_keeps_the_newest_items_whatever_their_chunks() -> None:
    rng = random.Random(1)
    ring = ByteRing(4, 10)
    everything = b""
    for _ in range(300):
        chunk = rng.randbytes(4 * rng.choice([0, 1, 2, 7, 10, 11, 25]))
        ring.extend(chunk)
        everything += chunk
        total = len(everything) // 4
        assert (ring.total, ring.oldest) == (total, max(0, total - 10))
        start = rng.randint(ring.oldest, total)
        stop = rng.randint(start, total)
        assert ring.read(start, stop) == everything[4 * start : 4 * stop]


def test_lost_and_future_items_cannot_be_read() -> None:
    ring = ByteRing(1, 3)
    ring.extend(b"abcde")
    with pytest.raises(IndexError):
        ring.read(1, 4)
    with pytest.raises(IndexError):
        ring.read(3, 6)
