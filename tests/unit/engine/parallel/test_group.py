"""Shares of a model, computed by ranks that are threads here, against the model computed alone."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from engine.errors import EngineInvariantError
from engine.model.check import open_model
from engine.model.decoder import Decoder
from engine.model.shards import Group, Shard, Unsummed
from engine.model.step import StepInputs
from engine.model.weights import load_weights
from engine.parallel.group import RankGroup
from engine.runner.arithmetic import make_arithmetic
from engine.runner.batch import make_inputs
from engine.runner.warm_up import make_text
from engine.scheduling.output import ScheduledSequence
from tests.support.models import (
    VARIANTS,
    VOCAB_SIZE,
    load_decoder,
    make_reference,
    write_folder,
    write_gguf,
)
from tests.support.ranks import UNEQUAL

BLOCK_SIZE = 4
NUM_BLOCKS = 64

MODELS = {**VARIANTS, "llama three kv heads": UNEQUAL}
CASES = [
    (variant, file_format, size)
    for variant, made in MODELS.items()
    for file_format in ("folder", "gguf")
    for size in range(2, made.overrides.get("num_key_value_heads", 2) + 1)
    if file_format == "folder" or "rope_parameters" not in made.overrides
]


def on_ranks(size: int, folder: Path, work: Callable[[RankGroup], torch.Tensor]) -> list[torch.Tensor]:
    """Have connected ranks do the same; return what each gets."""

    @torch.inference_mode()
    def run(rank: int) -> torch.Tensor:
        group = RankGroup(Shard(rank, size))
        group.connect(folder / "store", "gloo")
        return work(group)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def load_share(path: Path, group: Group, dtype: torch.dtype = torch.float32) -> Decoder:
    files, device = open_model(path), torch.device("cpu")
    weights = load_weights(files, dtype, device, lambda _: None, group.shard)
    arithmetic = make_arithmetic("reference", files.config, dtype, device, group)
    return Decoder(files.config, weights, files.config.max_position, arithmetic)


def make_steps() -> list[StepInputs]:
    """Return three steps of three sequences: prompts, chunks and single tokens mixed."""
    rng = random.Random(4)
    texts = [make_text(rng.choices(range(VOCAB_SIZE), k=count), []) for count in (50, 23, 37)]
    blocks = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    for text in texts:
        text.block_table = [blocks.pop() for _ in range(-(-text.num_tokens // BLOCK_SIZE))]
    spans = [[(0, 20), (0, 22), (0, 36)], [(20, 29), (22, 1)], [(49, 1), (36, 1)]]
    members = [[0, 1, 2], [0, 1], [0, 2]]
    return [
        make_inputs(
            [ScheduledSequence(texts[i], *span) for i, span in zip(who, step, strict=True)], BLOCK_SIZE
        )
        for who, step in zip(members, spans, strict=True)
    ]


@torch.inference_mode()
def compute(decoder: Decoder, steps: list[StepInputs]) -> torch.Tensor:
    """Compute steps on a cache in which whatever is read before it was written shows up as NaN."""
    cache = decoder.make_cache(NUM_BLOCKS, BLOCK_SIZE)
    cache.storage.fill_(torch.nan)
    return torch.cat([decoder.forward(decoder.make_batch(step), cache) for step in steps])


@pytest.mark.parametrize(("variant", "file_format", "size"), CASES)
def test_ranks_together_give_the_logits_of_the_whole_model(
    variant: str, file_format: str, size: int, tmp_path: Path
) -> None:
    write = write_gguf if file_format == "gguf" else write_folder
    path = write(make_reference(MODELS[variant]), tmp_path / "model")
    steps = make_steps()
    expected = compute(load_decoder(path), steps)  # (wanted, vocab_size): of a prompt that ends, and so on
    assert expected.shape == (3, VOCAB_SIZE)
    logits, *_ = on_ranks(size, tmp_path, lambda group: compute(load_share(path, group), steps))
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-5)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_two_ranks_in_bfloat16_are_as_near_as_its_rounding_allows(tmp_path: Path) -> None:
    path = write_folder(make_reference(VARIANTS["llama untied"]), tmp_path / "model")
    steps = make_steps()
    expected = compute(load_decoder(path), steps)
    logits, *_ = on_ranks(2, tmp_path, lambda group: compute(load_share(path, group, torch.bfloat16), steps))
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), expected, atol=0.05, rtol=0.05)


def test_sums_are_the_same_bits_on_all_ranks(tmp_path: Path) -> None:
    def add(group: RankGroup) -> torch.Tensor:
        generator = torch.Generator().manual_seed(group.shard.rank)
        return group.add_up(torch.randn(7, 33, generator=generator))

    first, *others = on_ranks(3, tmp_path, add)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("vocab_size", [6, 7, 8])
def test_shares_of_a_vocabulary_are_joined_in_order_on_rank_0(vocab_size: int, tmp_path: Path) -> None:
    whole = torch.arange(4.0 * vocab_size).view(4, vocab_size)

    def join(group: RankGroup) -> torch.Tensor:
        return group.join_logits(whole[:, group.shard.cut(vocab_size)], vocab_size)

    first, *others = on_ranks(3, tmp_path, join)
    assert torch.equal(first, whole)
    assert torch.equal(torch.cat(others, 1), whole[:, first.shape[1] - sum(o.shape[1] for o in others) :])


def test_nothing_is_sent_where_no_logits_are_wanted() -> None:
    logits = RankGroup(Shard(0, 2)).join_logits(torch.empty(0, 5), 10)
    assert logits.shape == (0, 10)


def test_a_group_that_is_not_connected_computes_nothing() -> None:
    with pytest.raises(EngineInvariantError, match="not connected"):
        RankGroup(Shard(0, 2)).add_up(torch.ones(1))


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_stated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.parallel.group.CONNECT_TIMEOUT_S", 0.5)
    with pytest.raises(RuntimeError, match=r"(?i)time"):
        RankGroup(Shard(0, 2)).connect(tmp_path / "store", "gloo")


def test_a_share_alone_has_the_shapes_of_the_whole(tmp_path: Path) -> None:
    path = write_folder(make_reference(UNEQUAL), tmp_path / "model")
    decoder = load_share(path, Unsummed(Shard(0, 2)))
    assert decoder.make_cache(2, 4).keys[0].shape == (2, 4, 2, 16)
    assert compute(decoder, make_steps()).shape == (3, VOCAB_SIZE)
