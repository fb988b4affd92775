"""The decoder against `transformers`, and the paged path against the plain one."""

import random
from pathlib import Path

import pytest
import torch

from engine.model.attention import KVCache
from engine.model.decoder import Decoder
from engine.model.reference_attention import ReferenceAttention
from engine.runner.batch import make_inputs
from engine.sampling_params import SamplingParams
from engine.scheduling.output import ScheduledSequence
from engine.sequence import EngineRequest, Sequence
from tests.support.models import VARIANTS, VOCAB_SIZE, load_decoder, make_reference, write_folder, write_gguf

BLOCK_SIZE = 4
NUM_BLOCKS = 64

# The GGUF writer here writes plain rotary settings; scaling in GGUF files is in test_config.
CASES = [
    (variant, file_format)
    for variant, made in VARIANTS.items()
    for file_format in ("folder", "gguf")
    if file_format == "folder" or "rope_parameters" not in made.overrides
]


def make_sequence(token_ids: list[int], block_table: list[int], num_prompt_tokens: int = 1) -> Sequence:
    request = EngineRequest(
        request_id="r", prompt_token_ids=token_ids[:num_prompt_tokens], sampling_params=SamplingParams()
    )
    sequence = Sequence(0, request, max_tokens=1)
    sequence.token_ids = list(token_ids)
    sequence.block_table = block_table
    return sequence


@torch.inference_mode()
def forward(
    decoder: Decoder,
    cache: KVCache,
    shares: list[tuple[Sequence, int, int]],
) -> torch.Tensor:
    """Compute tokens [start, start + count) of sequences; rows are logits of those that reach the end."""
    scheduled = [ScheduledSequence(sequence, start, count) for sequence, start, count in shares]
    return decoder.forward(decoder.make_batch(make_inputs(scheduled, BLOCK_SIZE)), cache).float()


def token_ids_of(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=count)


@torch.inference_mode()
def reference_logits(reference: torch.nn.Module, token_ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = reference(torch.tensor([token_ids])).logits[0]
    return logits.float()


@pytest.mark.parametrize(("variant", "file_format"), CASES)
def test_logits_equal_those_of_transformers(variant: str, file_format: str, tmp_path: Path) -> None:
    reference = make_reference(VARIANTS[variant])
    write = write_gguf if file_format == "gguf" else write_folder
    decoder = load_decoder(write(reference, tmp_path / "model"))
    token_ids = token_ids_of(1, 100)
    expected = reference_logits(reference, token_ids)
    cache = decoder.make_cache(NUM_BLOCKS, BLOCK_SIZE)
    blocks = list(range(25))
    for count in (1, 2, 57, 100):
        sequence = make_sequence(token_ids[:count], blocks)
        logits = forward(decoder, cache, [(sequence, 0, count)])
        torch.testing.assert_close(logits[0], expected[count - 1], atol=1e-4, rtol=1e-4)


def test_frequency_factors_of_a_gguf_file_act_like_llama3_scaling(tmp_path: Path) -> None:
    scaled = make_reference(VARIANTS["llama llama3 rope"])
    plain_inverse = 1.0 / (10000.0 ** (torch.arange(0, 16, 2).float() / 16))
    factors = plain_inverse / scaled.model.rotary_emb.inv_freq
    assert factors.max() > 1.5
    decoder = load_decoder(write_gguf(scaled, tmp_path / "m.gguf", freq_factors=factors))
    token_ids = token_ids_of(2, 80)
    logits = forward(
        decoder,
        decoder.make_cache(NUM_BLOCKS, BLOCK_SIZE),
        [(make_sequence(token_ids, list(range(20))), 0, 80)],
    )
    torch.testing.assert_close(logits[0], reference_logits(scaled, token_ids)[-1], atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    reference = make_reference(VARIANTS["qwen3 with q/k norms"])
    return load_decoder(write_folder(reference, tmp_path_factory.mktemp("model")))


def poisoned_cache(decoder: Decoder) -> KVCache:
    """Return a cache in which every slot that is read before it was written shows up as NaN."""
    cache = decoder.make_cache(NUM_BLOCKS, BLOCK_SIZE)
    for part in (*cache.keys, *cache.values):
        part.fill_(torch.nan)
    return cache


def solo_logits(decoder: Decoder, token_ids: list[int]) -> torch.Tensor:
    blocks = list(range(-(-len(token_ids) // BLOCK_SIZE)))
    sequence = make_sequence(token_ids, blocks)
    return forward(decoder, poisoned_cache(decoder), [(sequence, 0, len(token_ids))])[0]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("max_group_tokens", [None, 2], ids=["one group", "many groups"])
def test_any_chunking_batching_and_block_order_gives_the_logits_of_one_forward(
    decoder: Decoder, seed: int, max_group_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if max_group_tokens is not None:
        assert isinstance(decoder.arithmetic.attention, ReferenceAttention)
        monkeypatch.setattr(decoder.arithmetic.attention, "max_group_tokens", max_group_tokens)
    rng = random.Random(seed)
    blocks = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    contents = [token_ids_of(100 * seed + i, rng.randint(1, 40)) for i in range(6)]
    sequences = [
        make_sequence(ids, [blocks.pop() for _ in range(-(-len(ids) // BLOCK_SIZE))]) for ids in contents
    ]
    cache = poisoned_cache(decoder)
    computed = [0] * len(sequences)
    final: dict[int, torch.Tensor] = {}
    while len(final) < len(sequences):
        open_ones = [i for i in range(len(sequences)) if i not in final]
        chosen = rng.sample(open_ones, rng.randint(1, len(open_ones)))
        counts = [min(rng.choice([1, 1, 2, 7, 40]), sequences[i].num_tokens - computed[i]) for i in chosen]
        shares = [(sequences[i], computed[i], count) for i, count in zip(chosen, counts, strict=True)]
        logits = iter(forward(decoder, cache, shares))
        for i, count in zip(chosen, counts, strict=True):
            computed[i] += count
            if computed[i] == sequences[i].num_tokens:
                final[i] = next(logits)
    for i, ids in enumerate(contents):
        torch.testing.assert_close(final[i], solo_logits(decoder, ids), atol=2e-5, rtol=2e-5)


def test_slots_that_were_never_written_are_never_read(decoder: Decoder) -> None:
    cache = poisoned_cache(decoder)
    sequences = [
        make_sequence(token_ids_of(i, 5 + 9 * i), list(range(10 * i, 10 * i + 10))) for i in range(4)
    ]
    for sequence in sequences:
        forward(decoder, cache, [(sequence, 0, sequence.num_tokens - 1)])
    logits = forward(decoder, cache, [(sequence, sequence.num_tokens - 1, 1) for sequence in sequences])
    assert logits.isfinite().all()


def test_a_step_writes_only_the_slots_of_its_tokens(decoder: Decoder) -> None:
    cache = poisoned_cache(decoder)
    forward(decoder, cache, [(make_sequence(token_ids_of(5, 6), [3, 9]), 0, 6)])
    written = {(block, offset) for block, offset in (~cache.keys[1].isnan().all((2, 3))).nonzero().tolist()}
    assert written == {(3, 0), (3, 1), (3, 2), (3, 3), (9, 0), (9, 1)}


def test_shared_blocks_serve_two_sequences(decoder: Decoder) -> None:
    cache = poisoned_cache(decoder)
    prefix = token_ids_of(6, 8)
    first, second = [*prefix, 5, 6, 7], [*prefix, 9, 10]
    forward(decoder, cache, [(make_sequence(first, [4, 2, 7]), 0, 11)])
    logits = forward(decoder, cache, [(make_sequence(second, [4, 2, 8]), 8, 2)])
    torch.testing.assert_close(logits[0], solo_logits(decoder, second), atol=2e-5, rtol=2e-5)


def test_bfloat16_stays_close_to_float32(tmp_path: Path) -> None:
    reference = make_reference(VARIANTS["llama tied"])
    folder = write_folder(reference, tmp_path / "model")
    token_ids = token_ids_of(7, 60)
    wide, narrow = load_decoder(folder), load_decoder(folder, torch.bfloat16)
    logits = [
        forward(
            d, d.make_cache(NUM_BLOCKS, BLOCK_SIZE), [(make_sequence(token_ids, list(range(15))), 0, 60)]
        )[0]
        for d in (wide, narrow)
    ]
    assert narrow.dtype == torch.bfloat16
    cosine = torch.nn.functional.cosine_similarity(logits[0], logits[1], dim=0)
    assert cosine > 0.999
