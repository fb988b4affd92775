"""The pool's books: references, hashes, order of eviction."""

import pytest

from engine.errors import EngineInvariantError
from engine.kv import block_hash as block_hash_module
from engine.kv.block_hash import hash_block, root_hash
from engine.kv.block_pool import BlockPool
from engine.records import BlockOpKind, FreeCause
from tests.builders import make_core, make_request, run_to_end, solo_output, tokens_of


def store(pool: BlockPool, block_id: int, tokens: bytes, parent: bytes = b"") -> bytes:
    digest = hash_block(parent, tokens)
    pool.store_hash(block_id, 0, digest, parent, tokens)
    return digest


def test_blank_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool(3)
    block_ids = [pool.allocate(0) for _ in range(3)]
    store(pool, block_ids[0], b"12")
    pool.free(block_ids, 0, FreeCause.FINISHED)
    assert (pool.num_free, pool.num_cached, pool.num_used) == (2, 1, 0)
    assert {pool.allocate(0), pool.allocate(0)} == set(block_ids[1:])
    assert pool.allocate(0) == block_ids[0]
    assert [op.kind for op in pool.ops][-2:] == [BlockOpKind.EVICT, BlockOpKind.ALLOCATE]
    pool.check_integrity()


def test_tail_of_a_chain_is_evicted_first() -> None:
    pool = BlockPool(2)
    head, tail = pool.allocate(0), pool.allocate(0)
    parent = store(pool, head, b"12")
    store(pool, tail, b"34", parent)
    pool.free([tail, head], 0, FreeCause.FINISHED)
    assert pool.allocate(1) == tail
    assert pool.find(parent, b"", b"12") == head


def test_a_hit_keeps_the_block_from_eviction() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(0), pool.allocate(0)
    digest = store(pool, first, b"12")
    store(pool, second, b"34")
    pool.free([first, second], 0, FreeCause.FINISHED)
    pool.touch(first, 1)
    assert pool.allocate(1) == second
    assert pool.num_available == 0
    assert pool.find(digest, b"", b"12") == first


def test_double_free_is_a_bug_that_shows() -> None:
    pool = BlockPool(2)
    block_id = pool.allocate(0)
    with pytest.raises(EngineInvariantError, match="twice"):
        pool.free([block_id, block_id], 0, FreeCause.FINISHED)


def test_equal_content_is_published_once() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(0), pool.allocate(1)
    digest = store(pool, first, b"12")
    store(pool, second, b"12")
    assert pool.find(digest, b"", b"12") == first
    pool.free([second], 1, FreeCause.FINISHED)
    assert (pool.num_free, pool.num_cached) == (1, 0)
    pool.check_integrity()


def test_forced_collisions_never_serve_foreign_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_hash_module, "hash_block", lambda *_: b"same" * 8)
    core = make_core(num_blocks=16)
    outputs = {}
    for name, start in (("a", 100), ("b", 200), ("c", 100)):
        prompt = list(range(start, start + 10))
        core.add_request(make_request(name, prompt=prompt, max_tokens=3))
        outputs[name] = tokens_of(run_to_end(core))[name]
        assert outputs[name] == solo_output(prompt, 3)
    assert outputs["a"] == outputs["c"] != outputs["b"]


def test_salts_do_not_share() -> None:
    assert len({root_hash(None), root_hash(""), root_hash("a"), root_hash("b")}) == 4
    core = make_core(num_blocks=32)
    prompt = list(range(12))
    cached = []
    for index, salt in enumerate(["a", "b", "a", None]):
        core.add_request(make_request(f"r{index}", prompt=prompt, max_tokens=1, cache_salt=salt))
        cached.append(run_to_end(core)[-1].outputs[-1].num_cached_tokens)
    assert cached == [0, 0, 8, 0]


def test_integrity_check_finds_a_lost_block() -> None:
    core = make_core()
    core.add_request(make_request(max_tokens=9))
    core.step()
    core.check_integrity()
    core.scheduler.state.running[0].block_table.pop()
    with pytest.raises(EngineInvariantError):
        core.check_integrity()
