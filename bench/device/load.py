"""The load of the throughput comparison: seeded lengths and random tokens, the same for every engine."""

import random
from dataclasses import dataclass, replace

from bench.workload import Prompt
from engine.config import EngineConfig

BLOCK_SIZE = 16
SEED = 0


@dataclass(frozen=True)
class Load:
    """So many requests at once, their prompts and answers uniformly as long as these bounds say."""

    num_requests: int = 256
    prompt_tokens: tuple[int, int] = (100, 1024)
    new_tokens: tuple[int, int] = (100, 1024)
    max_num_batched_tokens: int = 8192

    def prompts(self, vocab_size: int) -> list[Prompt]:
        """Return the requests; every call gives the same."""
        rng = random.Random(SEED)
        lengths = [
            (rng.randint(*self.prompt_tokens), rng.randint(*self.new_tokens))
            for _ in range(self.num_requests)
        ]
        return [Prompt(rng.choices(range(vocab_size), k=length), num_new) for length, num_new in lengths]


FULL = Load()
TINY = Load(6, (5, 40), (4, 8), 64)


def load_of(*, is_tiny: bool) -> Load:
    """Return the load to be measured."""
    return TINY if is_tiny else FULL


def engine_config(load: Load, prompts: list[Prompt]) -> EngineConfig:
    """Return limits with which all requests run at once, in a pool that holds them to their ends."""
    num_blocks = sum(-(-(len(prompt.token_ids) + prompt.num_new) // BLOCK_SIZE) + 1 for prompt in prompts)
    longest = load.prompt_tokens[1] + load.new_tokens[1]
    return EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks + num_blocks // 50 + 1,  # the watermark keeps a hundredth free
        max_num_seqs=load.num_requests,
        max_num_batched_tokens=load.max_num_batched_tokens,
        max_model_len=-(-longest // BLOCK_SIZE) * BLOCK_SIZE,
    )


def sweep(num_requests: int) -> list[Prompt]:
    """Return requests whose number shrinks step by step to one, so that decode steps of all sizes come up."""
    step = max(1, num_requests // 32)
    last = num_requests - 8
    return [Prompt([1, 2, 3, 4], 2 + index // step + max(0, index - last)) for index in range(num_requests)]


def shortened(prompts: list[Prompt], num_new: int) -> list[Prompt]:
    """Return the same prompts with answers of so many tokens."""
    return [replace(prompt, num_new=num_new) for prompt in prompts]
