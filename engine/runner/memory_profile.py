"""Computes the largest steps that there may be, to see how much memory they take."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from engine.config import EngineConfig
from engine.model.attention import KVCache
from engine.model.decoder import Decoder
from engine.model.sampler import Draw, DrawTensors, choose, list_draws
from engine.model.step import StepInputs
from engine.runner.batch import lay_out
from engine.runner.gpu import Gpu
from engine.sampling_params import SamplingParams

_DRAWS = (SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.9))
"""Both ways to draw a token, plain and filtered: each takes memory of its own."""


class StepMemory(NamedTuple):
    """The most that steps take beside weights and KV pool, in bytes: any, and those that only decode."""

    any_step: int
    decode: int


@torch.inference_mode()
def profile_steps(decoder: Decoder, gpu: Gpu, config: EngineConfig) -> StepMemory:
    """Compute the steps on a KV pool of one block, in which all sequences lie: results do not matter."""
    cache = decoder.make_cache(1, config.block_size)
    cache.storage.zero_()

    def run(spans: list[tuple[int, int]]) -> None:
        _run(decoder, cache, make_inputs(spans, config.block_size))

    decode, prompts = list_decode_spans(config), list_prompt_spans(config)
    run(decode)  # what libraries allocate once is held from here on
    decode_bytes = _measure(gpu, lambda: run(decode))
    prompt_bytes = _measure(gpu, lambda: run(prompts))
    return StepMemory(max(decode_bytes, prompt_bytes), decode_bytes)


def _measure(gpu: Gpu, work: Callable[[], None]) -> int:
    gpu.begin_measuring()
    work()
    return gpu.measure()


def list_decode_spans(config: EngineConfig) -> list[tuple[int, int]]:
    """Return (first position, tokens) of as many sequences as may run, each at its last token."""
    return [(config.max_model_len - 1, 1)] * config.max_num_seqs


def list_prompt_spans(config: EngineConfig) -> list[tuple[int, int]]:
    """Return (first position, tokens) of as many prompts as may run, with as many tokens as a step takes."""
    num_seqs = config.max_num_seqs
    num_tokens = min(config.max_num_batched_tokens, num_seqs * config.max_model_len)
    each, rest = divmod(num_tokens, num_seqs)
    return [(0, each)] * (num_seqs - rest) + [(0, each + 1)] * rest


def make_inputs(spans: list[tuple[int, int]], block_size: int) -> StepInputs:
    """Return a step that computes token 0 all over, in block 0; single tokens come first."""
    rows = lay_out(spans)
    width = -(-int(rows.contexts.max()) // block_size)
    return StepInputs(
        input_ids=np.zeros(len(rows.positions), np.int32),
        positions=rows.positions,
        slot_mapping=rows.positions % np.int32(block_size),
        query_starts=rows.starts,
        context_lens=rows.contexts,
        block_tables=np.zeros((len(spans), width), np.int32),
        logits_rows=rows.starts[1:] - np.int32(1),
        num_decodes=int((rows.counts == 1).sum()),
        block_size=block_size,
    )


def _run(decoder: Decoder, cache: KVCache, inputs: StepInputs) -> None:
    logits = decoder.forward(decoder.make_batch(inputs), cache)  # (sequences, vocab_size)
    draws = [Draw(_DRAWS[row % len(_DRAWS)], 0, row) for row in range(inputs.num_sequences)]
    arrays = list_draws(draws, decoder.config.vocab_size)
    assert arrays is not None
    choose(logits, DrawTensors(*(torch.from_numpy(array).to(logits.device) for array in arrays)))
