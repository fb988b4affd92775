"""A ring of fixed-size items in one preallocated buffer."""


class ByteRing:
    """Keeps the newest `capacity` items of `item_bytes` bytes.

    Items are numbered from 0 in the order they came; the numbers never start over. The memory is
    taken once.
    """

    def __init__(self, item_bytes: int, capacity: int) -> None:
        """Allocate the buffer."""
        self._item_bytes = item_bytes
        self._capacity = capacity
        self._buffer = bytearray(item_bytes * capacity)
        self.total = 0
        """Items ever added; the next one gets this number."""

    @property
    def oldest(self) -> int:
        """Number of the oldest item that is still here (`total` when there is none)."""
        return max(0, self.total - self._capacity)

    def extend(self, data: bytes) -> None:
        """Append whole items; the oldest ones make room."""
        count = len(data) // self._item_bytes
        surplus = max(0, count - self._capacity)
        kept = memoryview(data)[surplus * self._item_bytes :]
        at = (self.total + surplus) % self._capacity * self._item_bytes
        head = min(len(kept), len(self._buffer) - at)
        self._buffer[at : at + head] = kept[:head]
        self._buffer[: len(kept) - head] = kept[head:]
        self.total += count

    def read(self, start: int, stop: int) -> bytes:
        """Return items [start, stop), which must all be here."""
        if not self.oldest <= start <= stop <= self.total:
            raise IndexError(f"items {start} to {stop} of a ring that holds {self.oldest} to {self.total}")
        size = (stop - start) * self._item_bytes
        at = start % self._capacity * self._item_bytes
        head = min(size, len(self._buffer) - at)
        return bytes(self._buffer[at : at + head]) + bytes(self._buffer[: size - head])
