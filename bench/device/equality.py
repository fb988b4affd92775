"""Greedy answers of the GPU against those of the CPU, in float32 with TF32 off.

Both run the whole engine on the same random weights: the GPU in a pool too small for its requests, with
chunked prompts, shared beginnings, preemption, run-ahead and graphs, the CPU in plain torch with room for
all. Two sums in different orders differ, so an answer may take another path where the CPU's two largest
logits nearly tie. The rule: tokens are equal up to the first position where those differ by less than `TIE`;
what comes after is not compared. How far apart the logits are is measured, too, and has to be well below.
"""

import random
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.device.engines import Run, Way, drive, make_core, make_decoder, make_device, make_runner
from bench.device.part import Findings, Options, parse
from bench.device.shapes import LLAMA_32_1B, QWEN3_06B, Maker, Tensors, decoder_weights, make_tensors
from bench.workload import Prompt
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.step import StepInputs
from engine.records import Preempted
from engine.runner.attention_choice import REFERENCE, TRITON
from engine.runner.torch_runner import TorchRunner

TIE = 1e-4
"""Logits that differ by less are taken as equal."""

_BLOCK_SIZE = 16
_SEED = 1
_THREADS = 4


@dataclass(frozen=True)
class Sizes:
    """Of the models (real heads, fewer and smaller layers), and of what they are asked."""

    num_layers: int = 3
    hidden_size: int = 384
    vocab_size: int = 4096
    num_requests: int = 16
    prompt_tokens: tuple[int, int] = (2, 240)
    new_tokens: int = 64
    num_blocks: int = 70
    max_num_seqs: int = 12
    max_num_batched_tokens: int = 256


_TINY = Sizes(1, 64, 320, 3, (4, 12), 20, 4, 3, 24)


def main() -> int:
    """Compare both families in several ways to compute; the exit status says whether all were right."""
    options = parse(__doc__)
    findings = Findings(options.json)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_num_threads(min(_THREADS, torch.get_num_threads()))  # others compile kernels meanwhile
    sizes = _TINY if options.is_tiny else Sizes()
    ways = [Way(TRITON)]
    if not options.is_tiny:
        ways += [Way(TRITON, computes_ahead=False, captures_graphs=False), Way(REFERENCE)]
    findings.put("tie", TIE)
    is_right = True
    for name, shape in (("Qwen3", QWEN3_06B), ("Llama", LLAMA_32_1B)):
        config = shrink(shape, sizes)
        figures = compare(config, sizes, ways, options)
        findings.put(name, figures)
        print(name, figures)
        is_right = is_right and all(way["is_right"] for way in figures["ways"].values())
    return 0 if is_right else 1


def shrink(shape: ModelConfig, sizes: Sizes) -> ModelConfig:
    """Return the family with real heads and few layers.

    The head is not tied: random embeddings would make every token predict itself, whatever attention gives.
    """
    return replace(
        shape,
        hidden_size=sizes.hidden_size,
        intermediate_size=3 * sizes.hidden_size,
        num_layers=sizes.num_layers,
        num_heads=8,
        num_kv_heads=4,
        vocab_size=sizes.vocab_size,
        max_position=2048,
        tied_embeddings=False,
    )


def make_prompts(sizes: Sizes) -> list[Prompt]:
    """Return requests, half of which begin like another one."""
    rng = random.Random(_SEED)
    shared = rng.choices(range(sizes.vocab_size), k=sizes.prompt_tokens[1] // 2)
    prompts = []
    for number in range(sizes.num_requests):
        token_ids = rng.choices(range(sizes.vocab_size), k=rng.randint(*sizes.prompt_tokens))
        prompts.append(Prompt((shared if number % 2 else []) + token_ids, sizes.new_tokens))
    return prompts


def compare(config: ModelConfig, sizes: Sizes, ways: list[Way], options: Options) -> dict[str, Any]:
    """Return the verdict on each way, how far it could be compared, and how near both logits are."""
    cpu = torch.device("cpu")
    prompts = make_prompts(sizes)
    limits = _make_limits(sizes)
    tensors = make_tensors(config, Maker(cpu, torch.float32, seed=_SEED))
    decoder = _make_decoder(config, tensors, cpu, REFERENCE)
    expected = run_on_cpu(decoder, prompts, limits)
    logits = [_logits_of(decoder, prompt, expected[i]) for i, prompt in enumerate(prompts)]
    gaps = [top_gaps(rows) for rows in logits]
    figures: dict[str, Any] = {"smallest_gap": min(map(min, gaps)), "ways": {}}
    for way in ways:
        other = _make_decoder(config, tensors, torch.device(options.device), way.attention)
        runner = make_runner(other, limits, way, make_device(options.device))
        run = drive(make_core(limits, runner), prompts)
        verdict = judge(expected, [run.answers[str(i)] for i in range(len(prompts))], gaps)
        verdict |= {
            "preemptions": _count_preemptions(run),
            "taken_from_run_ahead": runner.num_taken,
            "largest_logit_difference": max(
                float((_logits_of(other, prompt, expected[i]).cpu() - logits[i]).abs().max())
                for i, prompt in enumerate(prompts[:4])
            ),
        }
        figures["ways"][str(way)] = verdict
    return figures


def run_on_cpu(decoder: Decoder, prompts: list[Prompt], limits: EngineConfig) -> list[list[int]]:
    """Return the answers of the plain runner, in a pool that has room for all."""
    num_blocks = limits.num_blocks * 8
    runner = TorchRunner(
        decoder, num_blocks=num_blocks, block_size=limits.block_size, eos_token_ids=frozenset()
    )
    config = EngineConfig(
        num_blocks=num_blocks, block_size=limits.block_size, max_model_len=limits.max_model_len
    )
    answers = drive(EngineCore(config, runner), prompts).answers
    return [answers[str(number)] for number in range(len(prompts))]


def judge(expected: list[list[int]], found: list[list[int]], gaps: list[list[float]]) -> dict[str, Any]:
    """Compare answers by the rule of the smallest gap; `gaps`: of each expected token to the next best."""
    num_compared, num_equal, first_wrong = 0, 0, None
    for number, (right, other, distances) in enumerate(zip(expected, found, gaps, strict=True)):
        num_sure = next((i for i, gap in enumerate(distances) if gap < TIE), len(right))
        num_compared += num_sure
        num_same = next(
            (i for i, pair in enumerate(zip(right, other, strict=False)) if pair[0] != pair[1]),
            min(len(right), len(other)),
        )
        num_equal += num_same
        is_short = len(other) != len(right)
        if (num_same < num_sure or is_short) and first_wrong is None:
            first_wrong = {"request": number, "position": num_same, "tokens": len(other)}
    return {
        "is_right": first_wrong is None,
        "tokens": sum(map(len, expected)),
        "compared": num_compared,
        "equal": num_equal,
        "first_wrong": first_wrong,
    }


def top_gaps(logits: Tensor) -> list[float]:
    """Return by how much the largest logit of each row exceeds the second one."""
    best = logits.topk(2, -1).values  # (rows, 2)
    gaps: list[float] = (best[:, 0] - best[:, 1]).tolist()
    return gaps


@torch.inference_mode()
def _logits_of(decoder: Decoder, prompt: Prompt, answer: list[int]) -> Tensor:
    """Return the logits (len(answer), vocab_size) that an answer's tokens were chosen from, in one step."""
    inputs = make_prompt([*prompt.token_ids, *answer[:-1]], len(answer))
    cache = decoder.make_cache(inputs.block_tables.shape[1], _BLOCK_SIZE)
    return decoder.forward(decoder.make_batch(inputs), cache)


def make_prompt(token_ids: list[int], num_wanted: int) -> StepInputs:
    """Return a step that computes one sequence from its beginning; the last so many logits are wanted."""
    count, num_blocks = len(token_ids), -(-len(token_ids) // _BLOCK_SIZE)
    positions = np.arange(count, dtype=np.int32)  # (tokens)
    return StepInputs(
        input_ids=np.array(token_ids, np.int32),
        positions=positions,
        slot_mapping=positions,
        query_starts=np.array([0, count], np.int32),
        context_lens=np.array([count], np.int32),
        block_tables=np.arange(num_blocks, dtype=np.int32)[None],
        logits_rows=positions[-num_wanted:],
        num_decodes=int(count == 1),
        block_size=_BLOCK_SIZE,
    )


def _make_decoder(config: ModelConfig, tensors: Tensors, device: torch.device, attention: str) -> Decoder:
    moved = {name: tensor.to(device) for name, tensor in tensors.items()}
    with torch.inference_mode():
        return make_decoder(config, decoder_weights(config, moved), config.max_position, attention)


def _make_limits(sizes: Sizes) -> EngineConfig:
    longest = sizes.prompt_tokens[1] * 3 // 2 + sizes.new_tokens + _BLOCK_SIZE
    return EngineConfig(
        block_size=_BLOCK_SIZE,
        num_blocks=sizes.num_blocks,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_model_len=min(longest, sizes.num_blocks * _BLOCK_SIZE),
    )


def _count_preemptions(run: Run) -> int:
    return sum(isinstance(event, Preempted) for record in run.records for event in record.events)


if __name__ == "__main__":
    sys.exit(main())
