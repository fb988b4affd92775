"""Shares of counted things, of sizes and of weights."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.model.config import ModelConfig, RopeScaling
from engine.model.shards import Cut, Shard

SMOLLM2 = ModelConfig(
    architecture="llama",
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    max_position=8192,
    rope_theta=1e5,
    rope_scaling=RopeScaling(),
    rms_norm_eps=1e-5,
    tied_embeddings=True,
    qkv_bias=False,
    output_bias=False,
    qk_norm=False,
    eos_token_ids=frozenset(),
)

configs = st.builds(
    lambda kv_heads, group, half_head, mlp, vocab: replace(
        SMOLLM2,
        num_kv_heads=kv_heads,
        num_heads=kv_heads * group,
        head_dim=2 * half_head,
        intermediate_size=mlp,
        vocab_size=vocab,
    ),
    st.integers(1, 16),
    st.integers(1, 8),
    st.integers(1, 64),
    st.integers(16, 4096),
    st.integers(16, 200_000),
)


@given(st.integers(1, 64), st.integers(0, 10_000))
def test_shares_lie_side_by_side_and_differ_by_one_at_most(size: int, count: int) -> None:
    shares = [Shard(rank, size).cut(count) for rank in range(size)]
    assert [share.start for share in shares] == [0, *(share.stop for share in shares[:-1])]
    assert shares[-1].stop == count
    lengths = [share.stop - share.start for share in shares]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


@given(configs, st.data())
def test_shares_of_a_model_add_up_to_the_whole_and_keep_groups_together(
    config: ModelConfig, data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, config.num_kv_heads))
    shares = [Shard(rank, size).config(config) for rank in range(size)]
    for field in ("num_heads", "num_kv_heads", "intermediate_size"):
        assert sum(getattr(share, field) for share in shares) == getattr(config, field)
    group_size = config.num_heads // config.num_kv_heads
    assert {share.num_heads // share.num_kv_heads for share in shares} == {group_size}
    assert all(
        replace(share, num_heads=1, num_kv_heads=1, intermediate_size=1)
        == replace(config, num_heads=1, num_kv_heads=1, intermediate_size=1)
        for share in shares
    )


@given(configs, st.data())
def test_cuts_of_a_weight_cover_it_once(config: ModelConfig, data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 64))
    query = config.num_heads * config.head_dim
    lengths = {
        "embed.weight": (0, config.vocab_size),
        "head.weight": (0, config.vocab_size),
        "layers.0.q.weight": (0, query),
        "layers.0.q.bias": (0, query),
        "layers.0.k.bias": (0, config.kv_size),
        "layers.11.v.weight": (0, config.kv_size),
        "layers.0.gate.weight": (0, config.intermediate_size),
        "layers.0.up.weight": (0, config.intermediate_size),
        "layers.0.down.weight": (1, config.intermediate_size),
        "layers.0.o.weight": (1, query),
    }
    name = data.draw(st.sampled_from(sorted(lengths)))
    cuts = [Shard(rank, size).cut_weight(name, config) for rank in range(size)]
    dim, length = lengths[name]
    at = 0
    for cut in cuts:
        assert cut is not None
        assert (cut.dim, cut.start) == (dim, at)
        at = cut.stop
    assert at == length


def test_the_default_model_is_cut_by_groups_of_heads() -> None:
    first, second = (Shard(rank, 2).config(SMOLLM2) for rank in range(2))
    assert (first.num_heads, first.num_kv_heads) == (6, 2)
    assert (second.num_heads, second.num_kv_heads) == (3, 1)
    assert Shard(0, 2).cut_weight("layers.0.o.weight", SMOLLM2) == Cut(1, 0, 384)
    assert Shard(1, 2).cut_weight("layers.0.k.weight", SMOLLM2) == Cut(0, 128, 192)


@pytest.mark.parametrize(
    "name",
    ["norm.weight", "layers.0.attn_norm.weight", "layers.0.q_norm.weight", "layers.0.o.bias",
     "rope.freq_factors"],
)  # fmt: skip
def test_some_weights_are_whole_in_every_share(name: str) -> None:
    assert Shard(1, 2).cut_weight(name, SMOLLM2) is None


def test_a_model_of_one_share_is_not_cut() -> None:
    assert Shard().config(SMOLLM2) == SMOLLM2
    assert Shard().cut_weight("layers.0.q.weight", SMOLLM2) is None


def test_more_shares_than_key_value_heads_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="tensor_parallel_size is 4, but the model has 3 key/value heads to share out"
    ):
        Shard(0, 4).config(SMOLLM2)
