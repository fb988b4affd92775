"""How large a KV pool on a GPU may be: arithmetic on what was measured."""

from dataclasses import replace

import pytest

from engine.errors import ConfigError
from engine.runner.memory_plan import GRAPH_BYTES, MAX_BLOCKS, MemoryUse, plan_kv_memory, size_graphs

USE = MemoryUse(total=1000, free_at_start=980, held=300, step=100, graphs=50)


@pytest.mark.parametrize(
    ("changes", "utilization", "expected"),
    [
        ({}, 0.9, 900 - 450),
        ({}, 0.5, 500 - 450),
        # Others hold memory: what they have is not counted on.
        ({}, 1.0, 980 - 450),
        ({"free_at_start": 600}, 0.9, 600 - 450),
        ({"held": 849, "step": 0, "graphs": 50}, 0.9, 1),
    ],
)
def test_the_pool_gets_what_is_left(changes: dict[str, int], utilization: float, expected: int) -> None:
    assert plan_kv_memory(replace(USE, **changes), utilization, block_bytes=1) == expected


def test_a_pool_of_tiny_blocks_has_no_more_than_the_host_can_keep_books_of() -> None:
    use = MemoryUse(total=10**12, free_at_start=10**12, held=0, step=0, graphs=0)
    assert plan_kv_memory(use, 0.9, block_bytes=64) == 64 * MAX_BLOCKS


def test_too_little_for_a_block_says_what_takes_the_memory_and_what_to_change() -> None:
    assert plan_kv_memory(USE, 0.9, block_bytes=450) == 450
    with pytest.raises(ConfigError) as caught:
        plan_kv_memory(USE, 0.9, block_bytes=451)
    message = str(caught.value)
    assert message.startswith(
        "gpu_memory_utilization is 0.9, but the GPU is too small for that: of its 1,000 "
    )
    assert "900 may be used, and weights (300), a step (100) and CUDA graphs (50)" in message
    for option in ("--gpu-memory-utilization", "--max-num-batched-tokens", "--max-num-seqs", "smaller model"):
        assert option in message
    assert "\n" not in message


def test_memory_that_others_hold_is_named_as_what_is_missing() -> None:
    with pytest.raises(ConfigError, match="only 400 of its 1,000 bytes were free"):
        plan_kv_memory(replace(USE, free_at_start=400), 0.9, block_bytes=1)


def test_graphs_keep_their_logits_and_share_the_rest() -> None:
    assert size_graphs([1, 2, 4], logits_bytes=10, decode_bytes=1000) == 1000 + 7 * 10 + 3 * GRAPH_BYTES
