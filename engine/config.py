"""Engine configuration: asked for, then resolved once against model and machine. Nothing writes to it."""

from typing import NamedTuple

import msgspec

from engine.errors import ConfigError

MAX_BLOCK_SIZE = 256
"""A tail block's fill travels in one byte on the wire."""

MAX_NUM_SEQS = 4096
MAX_NUM_BLOCKS = 2**24
MAX_AGEING_S = 86_400.0
MAX_PRIORITY = 1000
"""Priorities are whole numbers from -1000 to 1000, lower ones more urgent."""

PREEMPTION_MODES = ("auto", "recompute", "swap")

AS_SUITS = 0
"""`max_num_seqs`, `max_num_batched_tokens` or `num_blocks` as asked for: whatever suits the device."""

DEFAULT_KV_MEMORY_BYTES = 2**30
"""Memory of the KV cache on the CPU, where nothing else is asked for."""


class StepLimits(NamedTuple):
    """How much one step computes, at most."""

    max_num_seqs: int
    max_num_batched_tokens: int


STEP_LIMITS = {"cpu": StepLimits(64, 256), "cuda": StepLimits(256, 8192)}
"""What suits a device. On two cores a step of 256 tokens takes a tenth of a second, which is how long answers
stand still; a GPU is busy only with thousands of rows."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and policies of one engine; every field is final once the engine is built."""

    block_size: int = 16
    """Tokens per KV block, 1 to 256."""

    num_blocks: int = 1024
    """Blocks in the KV pool; `AS_SUITS` until resolved."""

    max_num_seqs: int = STEP_LIMITS["cpu"].max_num_seqs
    """Most sequences in one step; `AS_SUITS` until resolved."""

    max_num_batched_tokens: int = STEP_LIMITS["cpu"].max_num_batched_tokens
    """Most tokens computed in one step, longer prompts in chunks; `AS_SUITS` until resolved."""

    max_model_len: int = 2048
    """Most tokens of one sequence, prompt and answer together."""

    max_waiting: int = 1024
    """Most sequences (answers of requests) that may wait; more are refused."""

    enable_prefix_caching: bool = True
    """Whether sequences share blocks that hold the same leading tokens."""

    watermark: float = 0.01
    """Share of the pool kept free when admitting beside running sequences, so that those can grow."""

    policy: str = "fcfs"
    """Order in which waiting requests are admitted: "fcfs", or "priority" (with ageing)."""

    priority_ageing_s: float = 1.0
    """How many seconds of waiting make up for one step of priority, under the policy "priority"."""

    preemption: str = "newest-first"
    """Which running sequence gives way when blocks run out."""

    preemption_mode: str = "auto"
    """What happens to a victim's blocks: thrown away ("recompute"), kept in the host tier ("swap") where that
    has room, or whichever costs less ("auto")."""

    preemption_quantum: int = 16
    """Tokens that a sequence generates, at least, between two of its preemptions."""

    num_host_blocks: int = 0
    """Blocks of the host tier, for swapped sequences and evicted prefixes; 0: there is none."""

    offload: bool = True
    """Whether evicted prefix blocks go to the host tier, where there is one."""

    lookahead: bool = True
    """Whether a sequence gets its next block a step before it needs it, while blank blocks are plenty."""

    recompute_ns_per_token: float = 0.0
    """What computing a token of a prompt takes, measured at start (0: not measured)."""

    swap_ns_per_block: float = 0.0
    """What copying a block to the host tier or back takes, measured at start (0: not measured)."""

    @property
    def watermark_blocks(self) -> int:
        """The watermark in blocks."""
        return int(self.num_blocks * self.watermark)

    def validate(self) -> None:
        """Raise `ConfigError` naming the first number that cannot work; the scheduler checks the names."""
        _check("block_size", self.block_size, 1, MAX_BLOCK_SIZE)
        _check("num_blocks", self.num_blocks, 1, MAX_NUM_BLOCKS)
        _check("max_num_seqs", self.max_num_seqs, 1, MAX_NUM_SEQS)
        _check("max_num_batched_tokens", self.max_num_batched_tokens, 1, 2**20)
        _check("max_model_len", self.max_model_len, 2, 2**24)
        _check("max_waiting", self.max_waiting, 1, 2**20)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, less than max_num_seqs "
                f"({self.max_num_seqs}): some sequences would not advance; raise the one or lower the other."
            )
        if self.max_model_len > self.num_blocks * self.block_size:
            raise ConfigError(
                f"max_model_len is {self.max_model_len}, but the pool holds {self.num_blocks} blocks of "
                f"{self.block_size} tokens: a sequence of that length could never run."
            )
        _check("preemption_quantum", self.preemption_quantum, 1, 2**20)
        _check("num_host_blocks", self.num_host_blocks, 0, MAX_NUM_BLOCKS)
        if not 0 <= self.priority_ageing_s <= MAX_AGEING_S:
            raise ConfigError(
                f"priority_ageing_s is {self.priority_ageing_s}; allowed: 0 to {MAX_AGEING_S:.0f}."
            )
        if self.preemption_mode not in PREEMPTION_MODES:
            raise ConfigError(
                f"preemption_mode is {self.preemption_mode!r}; allowed: {', '.join(PREEMPTION_MODES)}."
            )
        if self.preemption_mode == "swap" and self.num_host_blocks == 0:
            raise ConfigError("preemption_mode is swap, but there is no host tier; give swap_memory.")
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark is {self.watermark}; allowed: 0 to below 1.")


def suit(config: EngineConfig, device: str) -> EngineConfig:
    """Return the configuration with the limits of a step that were left open as they suit the device.

    `device` is one of `STEP_LIMITS`. What is left open gives way to what is not.
    """
    limits = STEP_LIMITS[device]
    max_num_seqs, max_num_batched_tokens = config.max_num_seqs, config.max_num_batched_tokens
    if max_num_seqs == AS_SUITS:
        max_num_seqs = min(limits.max_num_seqs, max_num_batched_tokens or limits.max_num_seqs)
    if max_num_batched_tokens == AS_SUITS:
        max_num_batched_tokens = max(limits.max_num_batched_tokens, max_num_seqs)
    return msgspec.structs.replace(
        config, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
    )


def resolve(
    config: EngineConfig,
    *,
    device: str,
    model_max_len: int,
    kv_bytes_per_block: int,
    kv_memory_bytes: int | None,
    swap_memory_bytes: int = 0,
) -> EngineConfig:
    """Return the configuration that will really be used.

    What was left open becomes what suits `device`. The pool gets as many blocks as `kv_memory_bytes` holds
    (None: `config.num_blocks` counts, and if that is left open, too, `DEFAULT_KV_MEMORY_BYTES`), the host
    tier as many as `swap_memory_bytes` holds (0: `config.num_host_blocks` counts). `max_model_len` is lowered
    to what the model knows and to what the pool can hold, so that any admitted request can run alone. Raises
    `ConfigError` if not even one block fits.
    """
    num_blocks = config.num_blocks
    if kv_memory_bytes is None and num_blocks == AS_SUITS:
        kv_memory_bytes = DEFAULT_KV_MEMORY_BYTES
    if kv_memory_bytes is not None:
        num_blocks = min(kv_memory_bytes // kv_bytes_per_block, MAX_NUM_BLOCKS)
        if num_blocks < 1:
            raise ConfigError(
                f"kv_memory is {kv_memory_bytes}, but one block of {config.block_size} tokens "
                f"needs {kv_bytes_per_block} bytes; give more, or a smaller block_size."
            )
    num_host_blocks = config.num_host_blocks
    if swap_memory_bytes:
        num_host_blocks = min(swap_memory_bytes // kv_bytes_per_block, MAX_NUM_BLOCKS)
        if num_host_blocks < 1:
            raise ConfigError(
                f"swap_memory is {swap_memory_bytes}, but one block of {config.block_size} tokens needs "
                f"{kv_bytes_per_block} bytes; give more, or none."
            )
    max_model_len = min(config.max_model_len, model_max_len, num_blocks * config.block_size)
    resolved = msgspec.structs.replace(
        suit(config, device),
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        max_model_len=max_model_len,
    )
    resolved.validate()
    return resolved


def _check(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value}; allowed: {low} to {high}.")
