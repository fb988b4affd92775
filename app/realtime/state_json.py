"""The engine's state as one JSON document, made without holding up the event loop.

A pool of 100,000 blocks takes a quarter of a second to describe. It is done in slices; blocks that change
meanwhile are done again, and the last few of them, with all the rest, in one go: the document is exactly
the state after one step.
"""

import asyncio
from typing import Any

import msgspec

from app.realtime.hub import EventHub
from engine.snapshot import EngineSnapshot

SLICE_BLOCKS = 1024
"""Blocks described in one go, about 3 ms."""

MAX_ROUNDS = 64
"""So often blocks that changed meanwhile are done again in slices before the rest is done in one go."""


async def encode_state(hub: EventHub, facts: dict[str, Any], *, with_blocks: bool = True) -> bytes:
    """Return `EngineSnapshot.to_dict()` and `facts` as JSON; empty of state while the model loads.

    One big document is made at a time; whoever asks meanwhile waits for its turn.
    """
    snapshot = hub.snapshot
    if snapshot is None:
        return msgspec.json.encode({**facts, **_EMPTY_STATE})
    if not with_blocks:
        return msgspec.json.encode({**facts, **snapshot.to_dict(with_blocks=False)})
    async with hub.state_turn:
        blocks = await _encode_blocks(hub, snapshot)
        # No await from the last block to here: everything is of the same step.
        head = msgspec.json.encode({**facts, **snapshot.to_dict(with_blocks=False)})
        return b"".join((head[:-1], b',"blocks":[', b",".join(blocks), b"]}"))


async def _encode_blocks(hub: EventHub, snapshot: EngineSnapshot) -> list[bytes]:
    num_blocks = snapshot.config.num_blocks
    blocks: list[bytes] = []
    changed: set[int] = set()
    with hub.listen(changed.update):
        while len(blocks) < num_blocks:
            ids = range(len(blocks), min(len(blocks) + SLICE_BLOCKS, num_blocks))
            blocks += [_encode_block(snapshot, block_id) for block_id in ids]
            if len(blocks) < num_blocks:
                await asyncio.sleep(0)
        for _ in range(MAX_ROUNDS):
            if len(changed) <= SLICE_BLOCKS:
                break
            for _ in range(SLICE_BLOCKS):
                block_id = changed.pop()
                blocks[block_id] = _encode_block(snapshot, block_id)
            await asyncio.sleep(0)
    for block_id in changed:
        blocks[block_id] = _encode_block(snapshot, block_id)
    return blocks


def _encode_block(snapshot: EngineSnapshot, block_id: int) -> bytes:
    return msgspec.json.encode(snapshot.block_to_dict(block_id))


_EMPTY_STATE: dict[str, Any] = {
    "step": 0,
    "t_ns": 0,
    "config": None,
    "counts": {"total": 0, "free": 0, "cached": 0, "used": 0},
    "running": [],
    "waiting": [],
    "batch": None,
    "totals": None,
    "policies": None,
    "host": {"total": 0, "used": 0, "pinned": 0},
    "blocks": [],
}
