import pytest
import torch

from bench.device.equality import make_prompt
from bench.device.shapes import (
    LLAMA_32_1B,
    QWEN3_06B,
    Maker,
    decoder_weights,
    list_shapes,
    list_weights,
    make_tensors,
    transformers_model,
)
from engine.model.decoder import Decoder

pytestmark = pytest.mark.unit

CPU = Maker(torch.device("cpu"), torch.float32)


def count_numbers(name: str) -> int:
    config = {"qwen": QWEN3_06B, "llama": LLAMA_32_1B}[name]
    return sum(torch.Size(shape).numel() for _, shape in list_weights(config))


def test_the_shapes_are_those_of_the_models_that_they_are_named_after() -> None:
    # As the model cards count them: 0.6B (0.44B without embeddings), 1.23B.
    assert count_numbers("qwen") == 596_049_920
    assert count_numbers("llama") == 1_235_814_400


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Llama-3.2-1B"])
def test_transformers_computes_the_same_logits_from_the_same_weights(name: str) -> None:
    config = list_shapes(is_tiny=True)[name]
    tensors = make_tensors(config, CPU)
    decoder = Decoder(config, decoder_weights(config, tensors), 64)
    token_ids = [index * 7 % 320 for index in range(40)]
    with torch.inference_mode():
        inputs = make_prompt(token_ids, len(token_ids))
        logits = decoder.forward(decoder.make_batch(inputs), decoder.make_cache(3, 16))
        peer = transformers_model(config, tensors, "sdpa")(torch.tensor([token_ids])).logits[0]
    torch.testing.assert_close(logits, peer, atol=2e-6, rtol=1e-5)
    assert logits.std() > 0.05


def test_every_process_makes_the_same_weights_and_another_seed_others() -> None:
    config = list_shapes(is_tiny=True)["Qwen3-0.6B"]
    first, again = make_tensors(config, CPU), make_tensors(config, CPU)
    assert all(torch.equal(first[name], again[name]) for name in first)
    other = make_tensors(config, Maker(CPU.device, CPU.dtype, seed=1))
    assert not any(torch.equal(first[name], other[name]) for name in first)
