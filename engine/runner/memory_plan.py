"""How much of a GPU's memory is left for keys and values. Arithmetic alone: what it takes was measured."""

from dataclasses import dataclass

from engine.errors import ConfigError

GRAPH_BYTES = 4 << 20
"""Reserved for what the driver keeps of each CUDA graph. Not measured; steps go without a graph that finds no
memory."""

MAX_BLOCKS = 1 << 20
"""The most that nobody has to ask for: the host has an object for each, and pages show each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """A GPU's memory before the KV pool is made, in bytes.

    `total` is all of it; `free_at_start` what nobody held before the model was loaded. `held` is what loading
    has taken: weights, and the code of kernels. `step` is the most that a step takes beside, `graphs` what
    CUDA graphs will keep.
    """

    total: int
    free_at_start: int
    held: int
    step: int
    graphs: int

    def __str__(self) -> str:
        """Say it in one line."""
        return (
            f"Of the GPU's {self.total:,} bytes {self.free_at_start:,} were free; weights take "
            f"{self.held:,}, a step up to {self.step:,}, CUDA graphs about {self.graphs:,}"
        )


def size_graphs(buckets: list[int], logits_bytes: int, decode_bytes: int) -> int:
    """Return what the CUDA graphs of decode steps will keep, in bytes.

    `buckets` are their batch sizes. Each keeps its logits, `logits_bytes` a sequence; what lies between is
    shared, and as much as the largest step takes: `decode_bytes`.
    """
    return decode_bytes + sum(buckets) * logits_bytes + len(buckets) * GRAPH_BYTES


def plan_kv_memory(use: MemoryUse, utilization: float, block_bytes: int) -> int:
    """Return the bytes that the KV pool may have; at most those of `MAX_BLOCKS`.

    `utilization` is the share of the GPU's memory that all may have together; what others hold is never
    counted on. Raises `ConfigError` if less than one block is left.
    """
    allowed = min(int(use.total * utilization), use.free_at_start)
    left = allowed - use.held - use.step - use.graphs
    if left >= block_bytes:
        return min(left, MAX_BLOCKS * block_bytes)
    limit = f"of its {use.total:,} bytes {allowed:,} may be used"
    if use.free_at_start < int(use.total * utilization):
        limit = f"only {use.free_at_start:,} of its {use.total:,} bytes were free"
    raise ConfigError(
        f"gpu_memory_utilization is {utilization}, but the GPU is too small for that: {limit}, and weights "
        f"({use.held:,}), a step ({use.step:,}) and CUDA graphs ({use.graphs:,}) leave no room for a block "
        f"of {block_bytes:,}; use a larger --gpu-memory-utilization, smaller --max-num-batched-tokens or "
        "--max-num-seqs, or a smaller model."
    )
