"""The default model on two ranks, which have two and one of its three groups of heads, against one process.

The rule: sums over ranks are added in another order, so logits may differ in their last bits. A token may
differ only where the two best logits are nearer to each other than `MIN_GAP`, thousands of times those bits.
"""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.loading import LoadedEngine, LoadRequest, load_engine
from engine.runner.batch import make_inputs
from engine.runner.torch_runner import TorchRunner
from engine.runner.warm_up import make_text
from engine.sampling_params import SamplingParams
from engine.scheduling.output import ScheduledSequence
from engine.sequence import EngineRequest

NUM_TOKENS = 12
MIN_GAP = 1e-3
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a village far away, there lived a",
    "1, 2, 3, 4, 5,",
    "Water boils at a temperature of",
    "Dear Sir or Madam,",
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def load(path: Path, cache: Path, num_ranks: int) -> LoadedEngine:
    request = LoadRequest(
        model_path=path,
        config=EngineConfig(num_blocks=64),
        cache_dir=cache,
        device="cpu",
        kernels="torch",
        num_threads=1,
        tensor_parallel_size=num_ranks,
    )
    return load_engine(request, lambda _: None)


def generate(core: EngineCore, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        core.add_request(
            EngineRequest(request_id=str(index), prompt_token_ids=prompt, sampling_params=params)
        )
    answers: list[list[int]] = [[] for _ in prompts]
    while core.has_work:
        for output in core.step().outputs:
            answers[int(output.request_id)].append(output.token_id)
    core.check_integrity()
    return answers


@torch.inference_mode()
def find_gap(runner: TorchRunner, token_ids: list[int]) -> float:
    """Return by how much the best logit after a text surpasses the next one, computed by one process."""
    block_size = runner._block_size
    text = make_text(token_ids, list(range(-(-len(token_ids) // block_size))))
    inputs = make_inputs([ScheduledSequence(text, 0, len(token_ids))], block_size)
    logits = runner._decoder.forward(runner._decoder.make_batch(inputs), runner._cache)
    best = logits[0].topk(2).values
    return float(best[0] - best[1])


def test_two_ranks_continue_texts_as_one_process_does(default_model_path: Path, tmp_path: Path) -> None:
    alone = load(default_model_path, tmp_path, 1)
    prompts = [alone.tokenizer.encode(text) for text in PROMPTS]
    expected = generate(alone.core, prompts)
    together = load(default_model_path, tmp_path, 2)
    with closing(together.core):
        assert together.info.place == "2 processes of 1 thread"
        answers = generate(together.core, prompts)
    assert isinstance(alone.core.runner, TorchRunner)
    for prompt, answer, wanted in zip(prompts, answers, expected, strict=True):
        pairs = zip(answer, wanted, strict=True)
        same = next((i for i, (got, want) in enumerate(pairs) if got != want), NUM_TOKENS)
        if same < NUM_TOKENS:
            assert find_gap(alone.core.runner, [*prompt, *wanted[:same]]) < MIN_GAP
