"""Chained block hashes: equal hashes mean equal tokens from the first one on.

hash(block i) = SHA-256(hash(block i - 1) ‖ token ids). The chain starts from a root that holds typed
extras (today the cache salt), so that sequences with different extras never share. SHA-256 rather
than a fast hash because a prompt that collides on purpose would read another user's KV (CVE-2025-25183).
"""

import hashlib
from array import array

from engine.sequence import Sequence


def root_hash(cache_salt: str | None) -> bytes:
    """Return the chain's start; extras are tagged by kind so that two kinds can never look alike."""
    if cache_salt is None:
        return b""
    return hashlib.sha256(b"salt:" + cache_salt.encode("utf-8", "surrogatepass")).digest()


def hash_block(parent: bytes, tokens: bytes) -> bytes:
    """Return the 32-byte hash of a full block, given its token ids as bytes, after `parent`."""
    return hashlib.sha256(parent + tokens).digest()


def private_root_hash(seq_id: int) -> bytes:
    """Return the chain's start of a sequence that shares with nobody."""
    return hashlib.sha256(b"sequence:" + str(seq_id).encode()).digest()


def extend_block_hashes(sequence: Sequence, block_size: int, root: bytes) -> None:
    """Hash the sequence's full blocks that have no hash yet, and keep their tokens as bytes."""
    hashes, tokens = sequence.block_hashes, sequence.block_tokens
    first, last = len(hashes), len(sequence.token_ids) // block_size
    if first == last:
        return
    packed = array("I", sequence.token_ids[first * block_size : last * block_size])
    data, width = packed.tobytes(), packed.itemsize * block_size
    parent = hashes[-1] if hashes else root
    for start in range(0, len(data), width):
        tokens.append(data[start : start + width])
        parent = hash_block(parent, tokens[-1])
        hashes.append(parent)
