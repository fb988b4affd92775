"""How many requests one client may have open at once."""

from collections import Counter

from engine.errors import QueueFullError

LIMIT_CODE = "concurrency_limit"


class Place:
    """One open request of a client; whoever holds it gives it back, on every way out."""

    def __init__(self, limits: "KeyLimits", key: bytes | None) -> None:
        """Made by `KeyLimits.take`."""
        self._limits = limits
        self._key = key

    def give_back(self) -> None:
        """Let another request have it. Safe to repeat, never waits."""
        key, self._key = self._key, None
        if key is not None:
            self._limits.release(key)


class KeyLimits:
    """Counts the open requests of each client. Lives on the event loop.

    Memory grows with open requests only: a client without any is forgotten.
    """

    def __init__(self, max_open: int) -> None:
        """Allow each client `max_open` requests; 0: any number."""
        self.max_open = max_open
        self._num_open: Counter[bytes] = Counter()

    @property
    def num_clients(self) -> int:
        """Clients that have a request open."""
        return len(self._num_open)

    def take(self, key: bytes | None) -> Place:
        """Count one more request of a client, None for one without limit.

        Raises `QueueFullError` if it has as many as it may.
        """
        if key is None or not self.max_open:
            return Place(self, None)
        if self._num_open[key] >= self.max_open:
            requests = "1 request" if self.max_open == 1 else f"{self.max_open} requests"
            raise QueueFullError(
                f"You have {requests} open, as many as a client may have here; wait for one to end.",
                code=LIMIT_CODE,
            )
        self._num_open[key] += 1
        return Place(self, key)

    def release(self, key: bytes) -> None:
        """Count one less."""
        self._num_open[key] -= 1
        if self._num_open[key] <= 0:
            del self._num_open[key]
