"""Blocks in host memory, found by hash: what swapped sequences come back for, and evicted prefixes.

A host block is free, cached (holds something, nobody waits for it; the least recently used one makes room) or
pinned (a swapped sequence waits for it, or a load reads it).
"""

from collections import OrderedDict

from engine.errors import EngineInvariantError


class HostTier:
    """Knows what each host block holds; the runner owns the memory and does the copying."""

    def __init__(self, num_blocks: int) -> None:
        """Make `num_blocks` free ones."""
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._contents: dict[int, tuple[bytes, bytes, bytes]] = {}  # hash, parent, tokens
        self._by_hash: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._pins: dict[int, int] = {}

    @property
    def num_used(self) -> int:
        """Host blocks that hold something."""
        return len(self._contents)

    @property
    def num_pinned(self) -> int:
        """Those that may not make room."""
        return len(self._pins)

    @property
    def num_available(self) -> int:
        """Host blocks that can take something new."""
        return self.num_blocks - len(self._pins)

    def find(self, block_hash: bytes, parent_hash: bytes, tokens: bytes) -> int | None:
        """Return the host block that holds these tokens after this parent, or None."""
        host_id = self._by_hash.get(block_hash)
        if host_id is None or self._contents[host_id] != (block_hash, parent_hash, tokens):
            return None
        return host_id

    def store(self, block_hash: bytes, parent_hash: bytes, tokens: bytes) -> int | None:
        """Return a host block to copy to, None if nothing needs to be copied or nothing can.

        Nothing needs to be if it is there already, which makes it the most recently used one; nothing can if
        all are pinned or other tokens have the hash.
        """
        if block_hash in self._by_hash:
            host_id = self._by_hash[block_hash]
            if host_id in self._cached:
                self._cached.move_to_end(host_id)
            return None
        if self._free:
            host_id = self._free.pop()
        elif self._cached:
            host_id, _ = self._cached.popitem(last=False)
            del self._by_hash[self._contents[host_id][0]]
        else:
            return None
        self._contents[host_id] = (block_hash, parent_hash, tokens)
        self._by_hash[block_hash] = host_id
        self._cached[host_id] = None
        return host_id

    def pin(self, host_id: int) -> None:
        """Keep what it holds until as many `unpin`."""
        self._cached.pop(host_id, None)
        self._pins[host_id] = self._pins.get(host_id, 0) + 1

    def unpin(self, host_id: int) -> None:
        """Let it go again; it is then the most recently used one."""
        if host_id not in self._pins:
            raise EngineInvariantError(f"host block {host_id} is released twice")
        self._pins[host_id] -= 1
        if self._pins[host_id] == 0:
            del self._pins[host_id]
            self._cached[host_id] = None

    def check_integrity(self, num_pins: int) -> None:
        """Raise `EngineInvariantError` unless the books add up; `num_pins` are those that owners know of."""
        if sum(self._pins.values()) != num_pins:
            raise EngineInvariantError(f"{sum(self._pins.values())} pins on host blocks, {num_pins} owners")
        if len(self._free) + len(self._contents) != self.num_blocks:
            raise EngineInvariantError("a host block is lost")
        if set(self._cached) | set(self._pins) != set(self._contents) or set(self._cached) & set(self._pins):
            raise EngineInvariantError("host blocks are neither cached nor pinned, or both")
        if {self._contents[host_id][0]: host_id for host_id in self._contents} != self._by_hash:
            raise EngineInvariantError("the index of host blocks disagrees with what they hold")
