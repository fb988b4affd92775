"""The default model as it is served by default: natively, without torch, and the same under any pressure."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from app.model_store import models_dir
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.loading import LoadedEngine, LoadRequest, load_engine
from engine.records import BlockOpKind, Preempted
from engine.sampling_params import SamplingParams
from engine.sequence import EngineRequest
from tests.support.engine_runs import run
from tests.support.kernels import open_library

CACHE_DIR = models_dir() / ".converted"
NUM_TOKENS = 20
NUM_BLOCKS = 128
TIGHT_BLOCKS = 9

PROBE = """
import sys
from pathlib import Path
from engine.api import generate
from engine.config import EngineConfig
from engine.loading import LoadRequest, load_engine
from engine.sampling_params import SamplingParams
request = LoadRequest(model_path=Path(sys.argv[1]), config=EngineConfig(), cache_dir=Path(sys.argv[2]))
engine = load_engine(request, lambda progress: None)
print(engine.info.dtype, "torch" in sys.modules)
print(generate(engine, ["The capital of France is"], SamplingParams(max_tokens=1, temperature=0.0)))
print("torch" in sys.modules)
"""


@pytest.fixture(scope="module")
def engine(default_model_path: Path) -> LoadedEngine:
    open_library()
    request = LoadRequest(
        model_path=default_model_path,
        config=EngineConfig(num_blocks=NUM_BLOCKS, max_model_len=256),
        device="cpu",
        cache_dir=CACHE_DIR,
    )
    return load_engine(request, lambda progress: None)


def test_the_default_is_native_in_four_bits(engine: LoadedEngine) -> None:
    assert engine.info.dtype == "q4"
    assert engine.info.kernels == open_library().isa
    packed_bytes = getattr(engine.core.runner, "model").weight_bytes  # noqa: B009 - not of every runner
    assert packed_bytes < 1.3 * engine.model_info.num_bytes


def test_loading_and_answering_imports_no_torch(default_model_path: Path) -> None:
    open_library()
    result = subprocess.run(
        [sys.executable, "-c", PROBE, str(default_model_path), str(CACHE_DIR)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert result.stdout.splitlines() == ["q4 False", "[' Paris']", "False"]


def test_a_chat_is_answered(engine: LoadedEngine) -> None:
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    request = EngineRequest(
        request_id="chat", prompt_token_ids=engine.tokenizer.encode_chat(question), sampling_params=params
    )
    answers, _ = run(engine.core, [request])
    assert "Paris" in engine.tokenizer.decode(answers["chat"])


def make_requests(engine: LoadedEngine) -> list[EngineRequest]:
    """Two groups with a long common beginning each, and some on their own; greedy and drawn."""
    beginnings = ["Once upon a time in a village by the sea, " * 4, "The history of the computer " * 4, ""]
    kinds = [
        SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=NUM_TOKENS, temperature=0.9, top_p=0.9, seed=7, ignore_eos=True),
    ]
    return [
        EngineRequest(
            request_id=str(i),
            prompt_token_ids=engine.tokenizer.encode(f"{beginnings[i % 3]}Number {i} says"),
            sampling_params=kinds[i % 2],
        )
        for i in range(6)
    ]


def test_answers_are_the_same_alone_batched_chunked_preempted_and_from_the_prefix_cache(
    engine: LoadedEngine,
) -> None:
    requests, runner = make_requests(engine), engine.core.runner

    def make_core(**changes: object) -> EngineCore:
        return EngineCore(msgspec.structs.replace(engine.core.config, **changes), runner)

    alone: dict[str, list[int]] = {}
    for request in requests:
        alone |= run(make_core(enable_prefix_caching=False), [request])[0]
    assert all(len(answer) == NUM_TOKENS for answer in alone.values())
    assert len({tuple(answer) for answer in alone.values()}) == len(requests)
    assert run(make_core(max_num_batched_tokens=2048), requests)[0] == alone
    assert run(make_core(max_num_batched_tokens=24, max_num_seqs=12), requests)[0] == alone
    tight, results = run(make_core(num_blocks=TIGHT_BLOCKS, max_model_len=TIGHT_BLOCKS * 16), requests)
    assert tight == alone
    events = Counter(type(event) for result in results for event in result.record.events)
    assert events[Preempted] > 0
    assert any(output.num_cached_tokens for result in results for output in result.outputs)
    assert any(op.kind == BlockOpKind.EVICT for result in results for op in result.record.block_ops)
