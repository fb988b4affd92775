"""Configuration: ranges, and what is resolved against model and memory."""

import inspect

import msgspec
import pytest

from engine.config import AS_SUITS, DEFAULT_KV_MEMORY_BYTES, EngineConfig, resolve, suit
from engine.errors import ConfigError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 0),
        ("block_size", 257),
        ("num_blocks", 0),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 63),
        ("max_model_len", 1),
        ("max_model_len", 16 * 1024 + 1),
        ("max_waiting", 0),
        ("watermark", 1.0),
        ("watermark", float("nan")),
    ],
)
def test_out_of_range_settings_are_named(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        msgspec.structs.replace(EngineConfig(), **{field: value}).validate()


def test_every_field_has_a_default_and_a_line_of_documentation() -> None:
    source = inspect.getsource(EngineConfig)
    for field in msgspec.structs.fields(EngineConfig):
        assert field.default is not msgspec.NODEFAULT
        assert f"    {field.name}:" in source
        after = source.split(f"    {field.name}:", 1)[1].split("\n", 2)[1]
        assert after.strip().startswith('"""'), field.name


def test_pool_is_sized_from_memory_and_limits_the_context() -> None:
    config = resolve(
        EngineConfig(block_size=16, max_model_len=8192),
        device="cpu",
        model_max_len=4096,
        kv_bytes_per_block=16_000,
        kv_memory_bytes=10**6,
    )
    assert (config.num_blocks, config.max_model_len) == (62, 992)
    config = resolve(
        EngineConfig(num_blocks=1000),
        device="cpu",
        model_max_len=1024,
        kv_bytes_per_block=1,
        kv_memory_bytes=None,
    )
    assert (config.num_blocks, config.max_model_len) == (1000, 1024)
    config = resolve(
        EngineConfig(num_blocks=AS_SUITS),
        device="cpu",
        model_max_len=1024,
        kv_bytes_per_block=2**20,
        kv_memory_bytes=None,
    )
    assert config.num_blocks == DEFAULT_KV_MEMORY_BYTES // 2**20


@pytest.mark.parametrize(
    ("device", "asked", "resolved"),
    [
        ("cpu", (AS_SUITS, AS_SUITS), (64, 256)),
        ("cuda", (AS_SUITS, AS_SUITS), (256, 8192)),
        ("cpu", (8, AS_SUITS), (8, 256)),
        ("cpu", (AS_SUITS, 1000), (64, 1000)),
        ("cuda", (7, 9), (7, 9)),
        # What was asked for is kept, and what was not gives way.
        ("cpu", (300, AS_SUITS), (300, 300)),
        ("cuda", (AS_SUITS, 100), (100, 100)),
    ],
)
def test_limits_of_a_step_that_nobody_asked_for_suit_the_device(
    device: str, asked: tuple[int, int], resolved: tuple[int, int]
) -> None:
    config = suit(EngineConfig(max_num_seqs=asked[0], max_num_batched_tokens=asked[1]), device)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == resolved
    config.validate()
    assert suit(config, "cpu") == suit(config, "cuda") == config


def test_memory_for_less_than_a_block_says_what_is_needed() -> None:
    with pytest.raises(ConfigError, match="needs 16000"):
        resolve(
            EngineConfig(),
            device="cpu",
            model_max_len=4096,
            kv_bytes_per_block=16_000,
            kv_memory_bytes=15_999,
        )
