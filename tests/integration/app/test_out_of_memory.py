"""A server that runs out of memory in its steps: whom it costs what."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine.config import EngineConfig
from engine.loading import LoadRequest, load_engine
from engine.runner.torch_runner import TorchRunner
from tests.support.api import Api, running_api
from tests.support.fake_engine import FakeEngine
from tests.support.tiny_server import write_tiny_model

if TYPE_CHECKING:
    from engine.loading import LoadedEngine

UNLUCKY = 33
"""A token that no step with it finds memory for."""

MAX_ROWS = 12
PROMPTS = [[60 + i, *range(70, 90 + i)] for i in range(6)]


class SmallEngine(FakeEngine):
    """A real engine on a tiny model; `rows` are those of steps that found no memory while it `is_small`."""

    def __init__(self, request: LoadRequest, *, is_small: bool) -> None:
        super().__init__()
        self.rows: list[int] = []
        self.is_small = is_small
        self._request = request

    def _load(self, on_progress: Callable[[Any], None]) -> "LoadedEngine":
        loaded = load_engine(self._request, on_progress)
        runner = loaded.core.runner
        assert isinstance(runner, TorchRunner)
        real = runner._decoder.forward

        def forward(batch: Any, cache: Any) -> torch.Tensor:
            logits = real(batch, cache)
            is_too_much = len(batch.input_ids) > MAX_ROWS or bool((batch.input_ids == UNLUCKY).any())
            if self.is_small and is_too_much:
                self.rows.append(len(batch.input_ids))
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return logits

        runner._decoder.forward = forward  # type: ignore[method-assign]
        return loaded


@pytest.fixture(scope="module")
def request_for_tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadRequest:
    torch.set_num_threads(1)
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    config = EngineConfig(num_blocks=64, max_num_seqs=8, max_num_batched_tokens=40, max_model_len=128)
    return LoadRequest(
        model_path=folder,
        config=config,
        cache_dir=folder.parent / "cache",
        device="cpu",
        kernels="torch",
    )


async def ask(api: Api, prompt: list[int]) -> tuple[int, str]:
    """Return the status, and the text or the code of the error."""
    response = await api.complete(prompt, max_tokens=12, temperature=0, ignore_eos=True)
    body = response.json()
    return response.status_code, body["choices"][0]["text"] if "choices" in body else body["error"]["code"]


async def answer_all(engine: SmallEngine, prompts: list[list[int]]) -> list[tuple[int, str]]:
    async with running_api(engine) as api:
        answers = await asyncio.gather(*(ask(api, prompt) for prompt in prompts))
        assert (await api.client.get("/health/ready")).status_code == 200
        state = (await api.client.get("/api/engine/state?blocks=0")).json()
        assert (state["counts"]["used"], state["running"], state["waiting"]) == (0, [], [])
    return answers


async def test_others_get_their_answers_and_a_request_without_memory_gets_an_error(
    request_for_tiny: LoadRequest,
) -> None:
    expected = await answer_all(SmallEngine(request_for_tiny, is_small=False), PROMPTS)
    assert [status for status, _ in expected] == [200] * 6
    engine = SmallEngine(request_for_tiny, is_small=True)
    unlucky = [*range(100, 140), UNLUCKY, *range(100, 120)]  # longer than a step: fails in the middle
    answers = await answer_all(engine, [*PROMPTS[:3], unlucky, *PROMPTS[3:]])
    assert answers.pop(3) == (503, "model_error")
    assert answers == expected
    assert max(engine.rows) > MAX_ROWS
    assert min(engine.rows) == 1


async def test_a_request_that_failed_is_served_once_there_is_memory(request_for_tiny: LoadRequest) -> None:
    prompt = [*PROMPTS[0], UNLUCKY, 7]
    expected = await answer_all(SmallEngine(request_for_tiny, is_small=False), [prompt])
    engine = SmallEngine(request_for_tiny, is_small=True)
    async with running_api(engine) as api:
        assert await ask(api, prompt) == (503, "model_error")
        engine.is_small = False
        # Its prompt was published in part before: what is found of it is right.
        assert await ask(api, prompt) == expected[0]
